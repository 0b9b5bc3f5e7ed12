"""A setting's training on its ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clcomm import Communicator, DistributedDataParallel, Mesh, Synchronizer
from clcomm.engine import Module, Replay, Tensor, no_grad
from clcomm.engine.nn.utils import clip_grad_norm_
from clcomm.engine.random_stream import RandomStream
from clcomm.parallel import SyncBatchNorm, parallelize_module
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.parallel.pipeline import Pipeline
from clcomm.parallel.tensor_parallel.shards import divided_state, gathered_state
from clcomm.sync.balance import Balancer
from clcomm.sync.clipping import clip_grad_norm
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.sampler import BalancedSampler
from tests.pairs.alone import edit_gradients, edit_parameters, optimizer_of, rate_of, scale_gradient, thaw
from tests.pairs.course import (
    LOCAL_STEPS,
    MAX_NORM,
    OVERFLOW,
    POLICIES,
    THAWED,
    Part,
    Shares,
    equal_batch,
    micro_batches_of,
    parts_of,
    samples_of,
    shards_each,
    shares_of,
    steps_of,
)
from tests.pairs.factors import LOCAL, Setting, mesh_of
from tests.pairs.networks import (
    Branch,
    Chain,
    Dropping,
    Replicas,
    bent_as_one,
    model_of,
    network_of,
    tensor,
)

#: Of a loss, so that float32 cannot hold the gradients at that scale.
_HUGE = 1e38
_COMPRESSION = {"topk": "topk:1.0", "powersgd": "powersgd:128"}  # of full rank
#: At which fp16 holds all gradients.
_SCALE = 2.0**12
_REDUCTION = {"ring": {"algorithm": "ring"}, "tree": {"algorithm": "tree"}, "adasum": {"combination": "adasum"}}
_BUCKETS: dict[str, dict[str, Any]] = {
    "1 MiB": {},
    "512 B": {"bucket_size": 512},
    "per tensor": {"use_bucketing": False},
    "split": {"bucket_size": 512, "split_tensors": True},
    "auto": {"bucket_size": "auto"},
}


class AtOnce(Balancer):
    """A Balancer that measures from the first step on."""

    WARM_UP_STEPS = 0


@dataclass
class Records:
    """Of each step the loss, None without a batch, and that after it, without dropout and the like; the norm of clipped
    gradients; the replicas' rows.
    """

    losses: list[float | None] = field(default_factory=list)
    evaluations: list[float | None] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)


class Job:
    """A setting on this rank; making one is collective, and so are its calls.

    records: of the steps that it trains.
    """

    def __init__(self, setting: Setting, comm: Communicator):
        self.setting, self.comm, self.network = setting, comm, network_of(setting)
        self.mesh = Mesh(comm, **mesh_of(setting)._asdict())
        self.replica = self.mesh["dp"].rank
        model: Module = model_of(setting, Replicas())
        self._turn_on_features(model)
        if setting["norm"] == "sync":
            model = SyncBatchNorm.convert_sync_batchnorm(model, self.mesh["dp"])
        if setting["tp"] != "1":
            plan = self.network.sequence_plan if "sequence" in setting["tp"] else self.network.plan
            model = parallelize_module(model, self.mesh["tp"], plan)
        self.pipeline = self._pipeline(model) if setting["pp"] != "1" else None
        self.model = model if self.pipeline is None else self.pipeline.module
        self.ddp, self.sync = self._wrapped()
        optimizer = optimizer_of(setting, self.model)
        self.optimizer = DistributedOptimizer(optimizer, self.sync) if setting["zero"] != "0" else optimizer
        if setting["edits"] == "gradients" and int(setting["zero"]) >= 2:  # which leave none to be edited later
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(scale_gradient)
        if self.ddp is None or setting["zero"] != "0":
            self.sync.broadcast_parameters(self.model)
        self.rate = rate_of(setting, self.optimizer)
        self.scaler = self._made_scaler()
        self.balancer = AtOnce(self.mesh["dp"], equal_batch(setting), window=1, least_gain=1)
        run = self._forward_backward if self.pipeline is None else self._pipeline_step
        self._run: Any = Replay(run) if setting["replay"] == "on" else run
        self._factor, self._has_overflow = 1.0, False
        self.records = Records()

    def _turn_on_features(self, model: Module) -> None:
        """Turn on what may change no number, which one rank is without."""
        recomputes = self.setting["activations"] == "recomputed"
        for _, each in model.named_modules():
            if isinstance(each, Branch):
                each.replica = self.replica
            if isinstance(each, (Branch, Dropping)):
                each.recomputes = recomputes
            if isinstance(each, Chain) and self.setting["functions"] == "fused":
                each.function = bent_as_one
        if self.setting["network"] == "gpt":
            model.transformer.h.recompute = recomputes

    def _pipeline(self, model: Module) -> Pipeline:
        schedule = self.setting["pp"].split()[1]
        stages = mesh_of(self.setting).pp * (2 if schedule == "interleaved" else 1)
        return Pipeline(
            model, self.mesh["pp"], loss=self._scaled_loss, micro_batches=micro_batches_of(self.setting),
            schedule=schedule, cut=self.network.cuts.get(stages, "layers"),
        )  # fmt: skip

    def _wrapped(self) -> tuple[DistributedDataParallel | None, Synchronizer]:
        setting, dp = self.setting, self.mesh["dp"]
        given = {
            **_BUCKETS[setting["buckets"]],
            **_REDUCTION.get(setting["reduction"], {}),
            "compression": _COMPRESSION.get(setting["compression"], setting["compression"]),
            "precision": setting["precision"],
            "check_replicas_every": int(setting["checks"] == "replicas"),
            "check_finite": setting["checks"] == "finite",
            "policy": POLICIES.get(setting["reduction"], "none"),
            "shards": shards_each(setting) * dp.size if setting["reduction"] == "shards" else None,
        }
        overlap: bool | str = {"off": False, "on": True, "auto": "auto"}[setting["overlap"]]
        zero = int(setting["zero"])
        if setting["wrapper"] == "Synchronizer":
            return None, Synchronizer(dp, overlap=overlap, zero=zero or 1, **given)
        ddp = DistributedDataParallel(
            self.model, dp, overlap_grad_reduce=overlap, zero=zero, broadcast_buffers=setting["buffers"] == "sent",
            **given,
        )  # fmt: skip
        return ddp, ddp.synchronizer

    def _made_scaler(self) -> GradScaler | None:
        return None if self.setting["scaler"] == "off" else GradScaler(self.sync, _SCALE, ranks=self.comm)

    # --- training ---

    def train(self, first: int, stop: int, records: Records | None = None) -> None:
        """Train steps `first` to `stop`, in the block that the setting asks for; records: None: the present ones."""
        self.records = self.records if records is None else records
        with self._block():
            for step in range(first, stop):
                if step == THAWED and self.setting["frozen"] == "thawed":
                    self._thaw()
                self.records.shares.append(self._shares(step))
                own = self.records.shares[-1][self.replica]
                if own is None:
                    self.records.losses.append(None)
                else:
                    self._step(step, own)
        if stop == steps_of(self.setting):
            self.sync.align_parameters(self.model)

    def _thaw(self) -> None:
        """Train all parameters from now on, through a new Synchronizer."""
        self.sync.align_parameters(self.model)
        thaw(self.model)
        self.ddp, self.sync = self._wrapped()
        self.sync.broadcast_parameters(self.model)
        before, self.scaler = self.scaler, self._made_scaler()
        if before is not None and self.scaler is not None:
            self.scaler.load_state_dict(before.state_dict())

    def _block(self) -> AbstractContextManager[None]:
        if "join" not in self.setting["inputs"]:
            return nullcontext()
        if self.ddp is not None:
            return self.ddp.join(step=self._finish)
        return self.sync.join(self.model, self._finish)

    def _shares(self, step: int) -> Shares:
        if self.setting["inputs"] != "balance":
            return shares_of(self.setting, step)
        size = equal_batch(self.setting) * self.mesh["dp"].size
        ends = np.cumsum([0, *self.balancer.shares])
        assert ends[-1] == size
        sampler = self._sampler()
        own = sampler.batches(equal_batch(self.setting))[step] - step * size
        assert (own[0], own[-1] + 1) == (ends[self.replica], ends[self.replica + 1])
        return [(int(start), int(stop)) for start, stop in itertools.pairwise(ends)]

    def _sampler(self) -> BalancedSampler:
        dp, size = self.mesh["dp"], equal_batch(self.setting)
        length = size * dp.size * steps_of(self.setting)
        return BalancedSampler(length, dp.rank, dp.size, self.balancer.shares, shuffle=False)

    def _step(self, step: int, own: tuple[int, int]) -> None:
        x, y = samples_of(self.setting, step, own)
        self._has_overflow = self.setting["scaler"] == "overflow" and step == OVERFLOW and self.replica == 0
        if self.setting["inputs"] == "expected":
            if self.ddp is not None:
                self.ddp.expect_samples(len(x))
            else:
                self.sync.expect_samples(self.model, len(x))
        if self.setting["reduction"] == "shards":
            self.records.losses.append(self._shards_backward(x, y))
        else:
            self.records.losses.append(self._parts_backward(x, y))
        if self.setting["reduction"] != "local SGD":
            self._average(len(x), step)
        self._finish()
        if self.setting["reduction"] in POLICIES:
            self.sync.finish_step(self.model)
        if self.setting["reduction"] == "local SGD" and (step + 1) % LOCAL_STEPS == 0:
            self.sync.average_parameters(self.model)
        if self.setting["evaluation"] == "on":
            self.records.evaluations.append(self._evaluated(x, y))
        if self.setting["inputs"] == "balance":
            self.balancer.step_finished(len(x), len(x) * (1.0 + 0.5 * self.replica))

    def _evaluated(self, x: np.ndarray, y: np.ndarray) -> float:
        whole = self.ddp or self.model if self.pipeline is None else self.pipeline
        whole.eval()
        with no_grad():
            if self.pipeline is not None:
                self._factor, self._has_overflow = 1.0, False
                scale = self.scaler.get_scale() if self.scaler is not None else 1.0
                found = self.pipeline.evaluate(tensor(x), tensor(y)) / scale
            else:
                found = self.network.loss(whole(tensor(x)), tensor(y)).item()
        whole.train()
        return found

    def _shards_backward(self, x: np.ndarray, y: np.ndarray) -> float:
        """Add the gradients of this rank's logical shards, and return their mean loss."""
        assert self.sync.shards is not None
        losses, own = [], self.sync.shards.own
        for number, shard in enumerate(own):
            rows = slice(number * len(x) // len(own), (number + 1) * len(x) // len(own))
            with self.sync.shard(self.model, shard):
                losses.append(self._parts_backward(x[rows], y[rows]))
        return float(np.mean(losses))

    def _parts_backward(self, x: np.ndarray, y: np.ndarray) -> float:
        """Add the gradients of the parts of a batch, and return its loss."""
        parts, loss = parts_of(self.setting, len(x)), 0.0
        for part in parts:
            is_held = self.setting["reduction"] == "local SGD"
            is_held |= self.setting["batches"] == "3 no_sync" and part is not parts[-1]
            with (self.ddp or self.sync).no_sync() if is_held else nullcontext():
                loss += part.weight * self._backward(x[part.start : part.stop], y[part.start : part.stop], part)
        return loss

    def _backward(self, x: np.ndarray, y: np.ndarray, part: Part) -> float:
        """Add the gradients of a part of the batch, and return its loss."""
        self._factor = part.weight
        if self.pipeline is None:
            return self._run(tensor(x), tensor(y), part.weight).item()
        scaled = self._run(tensor(x), tensor(y))
        return scaled / self._factor / (self.scaler.get_scale() if self.scaler is not None else 1.0)

    def _forward_backward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        loss = self.network.loss((self.ddp or self.model)(x), y)
        self._scaled(loss).backward(weight)
        return loss

    def _pipeline_step(self, x: Tensor, y: Tensor) -> float:
        assert self.pipeline is not None
        return self.pipeline.step(x, y, self.ddp)

    def _scaled_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._scaled(self.network.loss(output, target)) * self._factor

    def _scaled(self, loss: Tensor) -> Tensor:
        if self._has_overflow:
            loss = loss * _HUGE
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _average(self, samples: int, step: int) -> None:
        inputs = self.setting["inputs"]
        given: dict[str, float] = {} if inputs in ("equal", "expected", "join all") else {"samples": samples}
        if self.ddp is not None:
            self.ddp.finish_grad_sync(**given)
            return
        if inputs == "balance":
            given["of"] = self._sampler().samples_of_all(step, 1)
        elif inputs == "join all":
            given = {"samples": 1, "of": self.mesh["dp"].size}
        self.sync.sync_gradients(self.model, **given)

    def _finish(self) -> None:
        """Do what follows an average of gradients."""
        if self.ddp is None and self.setting["buffers"] == "sent":
            self.sync.broadcast_buffers(self.model)
        edits = self.setting["edits"] == "gradients" and int(self.setting["zero"]) < 2
        if self.scaler is not None and (edits or self.setting["clip"] != "off"):
            self.scaler.unscale_(self.optimizer)
        if edits:
            edit_gradients(self.setting, self.model.parameters())
        if self.scaler is not None:
            if self.setting["clip"] != "off":
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if self.setting["clip"] != "off":
                self._clip()
            self.optimizer.step()
        if self.setting["edits"] == "parameters":
            with self.sync.full_parameters(self.model) if self.setting["zero"] == "3" else nullcontext():
                edit_parameters(self.model)
        self.rate.step()
        self.optimizer.zero_grad()

    def _clip(self) -> None:
        if self.setting["clip"] == "own":
            norm = clip_grad_norm_(self.model.parameters(), MAX_NORM).item()
        elif self.pipeline is not None:
            norm = self.pipeline.clip_grad_norm(MAX_NORM)
        elif self.ddp is not None:
            norm = self.ddp.clip_grad_norm(MAX_NORM)
        else:
            norm = clip_grad_norm(self.sync, self.model, MAX_NORM)
        self.records.norms.append(norm)

    # --- state ---

    def streams(self) -> dict[int, list[np.ndarray]]:
        """Return the states of dropout's random numbers by replica, of each tensor-parallel rank; collective."""
        own = next((each for _, each in self.model.named_modules() if isinstance(each, Dropping)), None)
        state = None
        if own is not None:
            state = (own.stream or RandomStream.of(next(self.model.parameters()).device)).state()
        coordinates = self.mesh.coordinates
        found: dict[int, dict[int, np.ndarray]] = {}
        for replica, place, theirs in self.comm.all_gather_object((coordinates["dp"], coordinates["tp"], state)):
            if theirs is not None:
                found.setdefault(replica, {})[place] = theirs
        count = mesh_of(self.setting).tp if "sequence" in self.setting["tp"] else 1
        return {replica: [each[place] for place in range(count)] for replica, each in found.items()}

    def state(self) -> dict[str, np.ndarray]:
        """Return the whole model's state; collective."""
        with self.sync.full_parameters(self.model):
            return (self.model if self.pipeline is None else self.pipeline).state_dict()

    def checkpoint(self) -> dict[str, Any]:
        """Return what a checkpoint holds, rank 0's model and optimizer; collective."""
        state = self.state()
        optimizer = gathered_state(self.optimizer)
        is_own = self.pipeline is not None or self.setting["reduction"] in LOCAL
        firsts = (state, optimizer) if is_own else self.comm.all_gather_object((state, optimizer))[0]
        return {
            "model": firsts[0],
            "optimizer": firsts[1],
            "compression": self.sync.state_dict(self.model),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "rate": self.rate.state_dict(),
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; collective."""
        self.optimizer.load_state_dict(divided_state(self.optimizer, checkpoint["optimizer"]))
        (self.model if self.pipeline is None else self.pipeline).load_state_dict(checkpoint["model"])
        self.rate.load_state_dict(checkpoint["rate"])
        if checkpoint.get("compression"):
            self.sync.load_state_dict(self.model, checkpoint["compression"])
        if self.scaler is not None and checkpoint.get("scaler"):
            self.scaler.load_state_dict(checkpoint["scaler"])

    def close(self) -> None:
        self.mesh.close()
