"""Pipeline: a model's layers divided between ranks, trained on micro-batches by a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError, no_copy
from clcomm.base.schedules.pipeline import INTERLEAVED, ONE_F_ONE_B
from clcomm.comm.communicator import Communicator
from clcomm.engine import functional as F
from clcomm.engine.modes import no_grad
from clcomm.engine.nn import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.parallel.data_parallel import DistributedDataParallel
from clcomm.parallel.mesh import Mesh, ranks_along
from clcomm.parallel.pipeline.batches import BatchCheck, Kind, MicroBatches, planned_links
from clcomm.parallel.pipeline.executor import Batch, Bubble, Executor, Loss
from clcomm.parallel.pipeline.link import Links
from clcomm.parallel.pipeline.plan import LAYERS, agreed_plan
from clcomm.parallel.pipeline.stage import (
    WHOLE,
    ModelPart,
    Names,
    TiedParameters,
    own_state,
    parameters_of,
    whole_state,
)
from clcomm.sync.agreement import refused
from clcomm.sync.clipping import CLIPPING, check_max_norm, clip_averaged, clip_own
from clcomm.sync.model_sync import averaging_of

#: The name of a mesh's axis of pipeline-parallel ranks, in any case of letters.
PIPELINE_PARALLEL = "pp"
LOSS, STATE = "loss", "state"
#: The most kinds of batches whose links are kept.
_MOST_KINDS = 4
_FLOAT_BYTES = 4


class Pipeline:
    """A model in stages on the ranks of `comm`, each of which keeps the parameters of its own stages alone.

    Stage s, of `chunks` times as many as ranks, is on rank s modulo their number. A batch goes through the stages in
    micro-batches of equal size: `step` adds the gradients of the mean of their losses to those of `module`, which an
    optimizer, or a DistributedDataParallel along a mesh's other axis, takes like any module's. Layers that compare
    samples, such as batch norm, see a micro-batch at a time. Creating one is collective; all ranks give equal models,
    and should keep no reference to theirs, so that the other stages' memory is freed.

    Args:
        model: a Sequential, or a Module whose `pipeline_layers()` returns modules that compute it one after another.
        comm: the ranks, such as `mesh["pp"]`; a Mesh: its axis "pp".
        loss: `loss(output, target)` of a micro-batch, the mean over its samples.
        micro_batches: number of parts of a batch.
        schedule: "gpipe", "1f1b" or "interleaved".
        chunks: stages a rank; by default 2 with "interleaved", else 1.
        cut: "layers": stages of equally many layers that have parameters, each with those behind it that have none;
            "parameters": of as equal numbers of parameters as possible; or the first layer of each stage, from 0 on.
        costs: of each layer, such as `measured_costs` returns: the most expensive stage becomes as cheap as possible.
            Instead of `cut`.

    Attributes:
        module: this rank's parameters and buffers, named as in the whole model.
        schedule: the PipelineSchedule: its `drawing()`, its `bubble`.
        starts: the first layer of each stage.
        peak_activation_bytes: the most bytes of activations that this rank has kept at once, received ones included.

    Raises:
        ArgumentError: an argument is invalid, such as more stages than layers; on every rank.
        MismatchError: ranks differ in the model or in an argument; on every rank.
    """

    def __init__(
        self,
        model: Module,
        comm: Communicator | Mesh,
        *,
        loss: Loss,
        micro_batches: int,
        schedule: str = ONE_F_ONE_B,
        chunks: int | None = None,
        cut: str | Sequence[int] = LAYERS,
        costs: Sequence[float] | None = None,
    ):
        self.comm = self._comm = comm = ranks_along(comm, PIPELINE_PARALLEL)
        if chunks is None:
            chunks = 2 if schedule == INTERLEAVED else 1
        layers, self.schedule, self.starts = agreed_plan(
            comm, model, loss, (schedule, micro_batches, chunks), cut, costs
        )
        starts = [*self.starts, len(layers)]
        per_stage = [layers[starts[number] : starts[number + 1]] for number in range(self.schedule.stages)]
        own = range(comm.rank, self.schedule.stages, comm.size)
        names = Names(model)
        #: All names of the model's state, of which a shared parameter has several, and the one that stages know it by.
        self._names = {name: names.of(tensor) for name, tensor in model._state().items()}
        self.module = ModelPart(model, (layer for number in own for layer in per_stage[number]))
        self._stages = {number: per_stage[number] for number in own}
        self.device = next(model.parameters()).device
        self._tied = TiedParameters(comm, self.schedule, per_stage)
        self._tied.give_values()
        for parameter in self.parameters():
            parameter.stages = self._tied
        used = [id(each) for number in own for each in parameters_of(per_stage[number])]
        #: Whether a gradient is complete after the backwards of several stages alone.
        self._has_shared = self._tied.are_here or len({*used}) < len(used)
        self._executor = Executor(comm, self.device, self.schedule, self._stages, loss)
        self._check = BatchCheck(comm, self.schedule.micro_batches)
        self._links: dict[Kind, Links] = {}

    def __reduce__(self) -> NoReturn:
        raise no_copy("Pipeline", "make another where one is needed")

    # --- a step ---

    @refused
    def step(
        self, inputs: object, targets: object, ddp: DistributedDataParallel | None = None, *, weight: float = 1.0
    ) -> float:
        """Run forward and backward of a batch, and return the mean of the micro-batches' losses; collective.

        Gradients are added to those that `module` has.

        Args:
            inputs: an array or Tensor of samples; needed on the first rank, None elsewhere is fine.
            targets: likewise for the loss; needed on the last rank.
            ddp: the wrapper of `module`; its overlap then begins buckets in the last backward of each stage. Those of a
                rank with tied parameters wait for `finish_grad_sync()`. None: nothing overlaps.
            weight: of the gradients, such as the batch's share of a step of several; the last stage's rank's counts.

        Raises:
            ArgumentError: one is missing where it is needed, the batch cannot be cut, `ddp` is of another module, or
                None where an overlap follows `module`; on every rank.
            MismatchError: ranks have different ones; on every rank.
        """
        self._require_averaging(ddp)
        links, batch = self._prepare(inputs, targets, needs_targets=True)
        accumulate = nullcontext if ddp is None or self._has_shared else ddp.no_sync  # but for a stage's last backward
        self._tied.begin_step()
        with ddp.no_sync() if ddp is not None and self._has_shared else nullcontext():
            losses = self._executor.train(links, batch, accumulate, weight)
        self._tied.sum_gradients()
        return self._mean_loss(losses)

    def evaluate(self, inputs: object, targets: object) -> float:
        """Return the mean of the micro-batches' losses, without gradients; collective. Arguments as for `step`.

        Modules compute in the mode that `train` and `eval` set; so they do in `forward`.
        """
        results = self._executor.evaluate(*self._prepare(inputs, targets, needs_targets=True))
        return self._mean_loss([float(each.item()) for each in results])

    def forward(self, inputs: object) -> Tensor | None:
        """Return the model's result on the last rank, else None, without a tape; collective; inputs as for `step`."""
        results = self._executor.evaluate(*self._prepare(inputs, None, needs_targets=False))
        self.comm.barrier()  # no rank goes on while others still wait for it
        with no_grad():
            return F.concat(results, 0) if results else None

    __call__ = forward

    @refused
    def _prepare(self, inputs: object, targets: object, *, needs_targets: bool) -> tuple[Links, Batch]:
        kind = self._check.agreed(inputs, targets, needs_targets)
        links = self._links.pop(kind, None)
        if links is None:
            while len(self._links) >= _MOST_KINDS:
                self._links.pop(next(iter(self._links)))
            if any(each.requires_grad for each in self.parameters()):
                self.module.flat_space()  # so that gradients have their memory before activations are counted
            ranks = self.comm, self.device
            links = Links(*ranks, planned_links(*ranks, self.schedule, self._stages, self.module, kind))
        self._links[kind] = links  # the latest again
        has_targets = needs_targets and self.schedule.stages - 1 in self._stages
        count = self.schedule.micro_batches
        batch = Batch(
            MicroBatches(inputs, count, self.device) if 0 in self._stages else None,
            MicroBatches(targets, count, self.device) if has_targets else None,
        )
        return links, batch

    def _require_averaging(self, ddp: object) -> None:
        """Raise ArgumentError for a step with this `ddp` that would average gradients that are not complete."""
        if self._tied.are_here and self.module.flat_space().blocks is not None:
            raise ArgumentError(
                "zero: expected 0 or 1 with parameters that several stages share, whose gradients are complete after "
                "all backwards, got 2 or 3"
            )
        if ddp is None:
            accumulates = self.schedule.micro_batches > 1 or self._has_shared
            averaging = averaging_of(self.module)
            if accumulates and averaging is not None and averaging.begins_in_backward:
                raise ArgumentError(
                    "ddp: expected the DistributedDataParallel whose overlap follows this pipeline's module, got None"
                )
        elif not isinstance(ddp, DistributedDataParallel) or ddp.module is not self.module:
            got = "one of another module" if isinstance(ddp, DistributedDataParallel) else type(ddp).__name__
            raise ArgumentError(f"ddp: expected a DistributedDataParallel of this pipeline's module, got {got}")

    def _mean_loss(self, losses: Sequence[float]) -> float:
        mean = np.array([np.mean(losses) if losses else 0.0])
        return float(self.comm.broadcast(mean, self.comm.size - 1, label=LOSS)[0])

    # --- parameters ---

    def parameters(self) -> Iterator[Parameter]:
        """Yield this rank's parameters."""
        return self.module.parameters()

    def zero_grad(self) -> None:
        """Drop this rank's gradients."""
        self.module.zero_grad()

    def train(self, mode: bool = True) -> Pipeline:
        """Set `training` on this rank's modules; return the pipeline."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set `training` to False on this rank's modules; return the pipeline."""
        return self.train(False)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients so that the norm of all stages' together is at most `max_norm`; return it before.

        Collective; after the data-parallel mean, if there is one. With a DistributedDataParallel of `module` its
        `clip_grad_norm` does the same. See `clcomm.clip_grad_norm`.
        """
        check_max_norm(max_norm)
        averaging = averaging_of(self.module)
        with self.comm.phase(CLIPPING):
            if averaging is None:
                return clip_own(dict(self.module.named_parameters()), self._tied, max_norm)
            return clip_averaged(averaging.comm, averaging.space, averaging.sharded_update, max_norm)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the whole model's parameters and buffers, on every rank, by their names there; collective."""
        parts = self.comm.all_gather_object(self.module.state_dict(), label=STATE)
        found = {name: values for part in reversed(parts) for name, values in part.items()}
        return {name: found[own] for name, own in self._names.items() if own in found}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Overwrite this rank's parameters and buffers with those of a whole model.

        Raises ArgumentError, changing nothing, where names or shapes do not fit.
        """
        given = {own: state[name] for name, own in self._names.items() if name in state}
        missing, unknown = sorted({*self._names.values()} - given.keys()), sorted(state.keys() - {*self._names})
        if missing or unknown:
            raise ArgumentError(
                f"state_dict: expected the whole model's names; missing {missing or 'none'}, "
                f"unknown {unknown or 'none'}"
            )
        self.module.load_state_dict({name: given[self._names[name]] for name in self.module._state()})

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, np.ndarray]:
        """Return the state that the optimizer of the whole model would have, on every rank; collective.

        Args:
            optimizer: of `clcomm.optim`, over `module`, or a DistributedOptimizer of one.
        """
        return whole_state(self.comm, self._names, optimizer)

    def load_optimizer_state_dict(self, optimizer: Any, state: Mapping[str, np.ndarray]) -> None:
        """Continue from an optimizer's state of the whole model; arguments as for `optimizer_state_dict`.

        Raises ArgumentError, changing nothing, for the state of another optimizer or of other parameters.
        """
        optimizer.load_state_dict(own_state(optimizer, state))

    # --- figures ---

    @property
    def peak_activation_bytes(self) -> int:
        """The most bytes of activations that this rank has kept at once, received ones included."""
        return self._executor.peak_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots between this rank's stages and others, for the latest shape of batches."""
        return next(reversed(self._links.values())).nbytes if self._links else 0

    def bubble(self) -> Bubble:
        """Return the share of time in which ranks did not compute, in the steps since `reset_times`; collective."""
        return self._executor.bubble()

    def figures(self) -> dict[str, Any]:
        """Return what a report says of the stages: their layers, sizes and bubble; collective.

        Lists have an entry for each rank in bytes, `first_layers` one for each stage; `bubble` is None before a step.
        """
        bubble = self.bubble()
        own = self.module.parameter_count(), self.peak_activation_bytes
        sizes = self.comm.all_gather(np.array(own, np.int64), label=WHOLE).reshape(-1, len(own))
        return {
            "schedule": self.schedule.name, "micro_batches": self.schedule.micro_batches,
            "chunks": self.schedule.chunks, "first_layers": list(self.starts),
            "parameter_bytes": (sizes[:, 0] * _FLOAT_BYTES).tolist(), "peak_activation_bytes": sizes[:, 1].tolist(),
            "bubble": bubble.measured if bubble.steps else None, "bubble_by_formula": bubble.formula,
        }  # fmt: skip

    def reset_times(self) -> None:
        """Forget the steps' times and the peak of activations."""
        self._executor.steps.clear()
        self._executor.peak_bytes = 0
