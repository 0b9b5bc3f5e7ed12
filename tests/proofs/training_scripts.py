"""Small trainings on several ranks, right ones and ones with a planted mistake, for `tests.proofs.verify`.

`python -m tests.proofs.training_scripts API MODEL VARIANT SEED` is one of them as a script. A variant is a mistake of
MISTAKES or a right way to train of RIGHT, by the API that it is written for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

SAMPLES, WIDTH, CLASSES, STEPS = 480, 12, 4, 4

#: By API: the mistakes that can be made with it, each named as the cause that is to be found.
MISTAKES = {
    "collectives": ("start", "no-sync", "late-sync", "left-out", "sum", "divided-twice", "same-data", "overlap",
                    "unequal-batches", "options", "state", "clip", "zero-grad", "skipped-step"),
    "ddp": ("no-sync", "left-out", "sum", "divided-twice", "same-data", "overlap", "unequal-batches", "options",
            "state", "zero-grad", "buffers", "skipped-step", "unused"),
    "hvd": ("start", "no-sync", "late-sync", "sum", "divided-twice", "same-data", "overlap", "unequal-batches",
            "options", "state", "clip", "zero-grad", "buffers"),
    "native": ("start", "no-sync", "late-sync", "left-out", "sum", "divided-twice", "same-data", "overlap",
               "unequal-batches", "options", "state", "zero-grad", "buffers", "skipped-step"),
}  # fmt: skip
RIGHT = {
    "collectives": ("plain", "accumulation", "loss-divided", "clipped", "frozen", "tied", "dropout", "weighted"),
    "ddp": ("plain", "accumulation", "zero-redundancy", "autocast", "scaler", "clipped", "frozen", "tied", "dropout",
            "schedule", "unused-everywhere", "joined"),
    "hvd": ("plain", "accumulation", "half", "clipped", "sync-batch-norm", "frozen", "tied", "dropout", "joined"),
    "native": ("plain", "accumulation", "zero-1", "zero-2", "zero-3", "bf16", "clipped", "weighted", "sync-batch-norm",
               "frozen", "overlapped", "half", "dropout", "shards", "joined", "diloco"),
}  # fmt: skip
#: Mistakes after which ranks wait for each other, so that their job can run nothing else.
HANGS = ("skipped-step", "unused")
#: What needs batch norm, and is then drawn with it.
NORMED = ("buffers", "sync-batch-norm")


class Case:
    """One training on this rank."""

    def __init__(self, model: str, variant: str, seed: int, rank: int, size: int):
        self.kind, self.variant, self.seed, self.rank, self.size = model, variant, seed, rank, size
        self.lr = 0.05 * (1 + rank if variant == "options" else 1)
        self.passes = 2 if variant == "accumulation" else 1
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32)
        self.y = rng.integers(0, CLASSES, SAMPLES)

    def has(self, *variants: str) -> bool:
        return self.variant in variants

    @property
    def start_seed(self) -> int:
        return self.seed + (self.rank if self.has("start") else 0)

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng(self.seed + (self.rank if self.has("overlap") else 0)).permutation(SAMPLES)
        own = order[:: self.size] if self.has("same-data", "overlap") else order[self.rank :: self.size]
        count = 6 + (6 * self.rank if self.has("unequal-batches", "weighted") else 0)
        count = 20 if self.has("overlap") else count  # so that the ranks read some of the same
        early = 1 + (self.rank == 0) if self.has("joined") else 0  # rank 0 has a batch less
        for step in range((STEPS - early) * self.passes):
            part = own[step * count : (step + 1) * count]
            yield self.x[part], self.y[part]

    def skips(self, step: int) -> bool:
        return self.has("skipped-step") and self.rank == 1 and step == 1


def _within(block: AbstractContextManager[Any], batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches within a block, such as one that waits for ranks with more of them."""
    with block:
        yield from batches


# --- PyTorch ---


def _torch_model(case: Case) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(case.start_seed)
    middle = {"norm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.2)]}.get(case.kind, [])
    if case.has("sync-batch-norm"):
        import clcomm.horovod as hvd

        middle = [hvd.SyncBatchNorm(16)]
    layers = [nn.Linear(WIDTH, 16), *middle, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)]
    if (case.has("unused") and case.rank == 1) or case.has("unused-everywhere"):
        layers[-3].forward = lambda x: x
    model = nn.Sequential(*layers)
    if case.has("tied"):
        model.append(nn.Linear(CLASSES, 16, bias=False))
        model.append(nn.Linear(16, CLASSES, bias=False))
        model[-1].weight = nn.Parameter(model[-2].weight.detach().T.contiguous())
        model[-4].weight = model[-1].weight
    if case.has("frozen"):
        model[0].weight.requires_grad_(False)
    if case.kind == "dropout" or case.has("dropout"):
        torch.manual_seed(1000 + case.rank)
    return model


def _tensors(case: Case) -> Iterator[tuple[Any, Any]]:
    import torch

    for x, y in case.batches():
        yield torch.from_numpy(x), torch.from_numpy(y)


def _load_state(case: Case, model: Any, optimizer: Any) -> None:
    """Give rank 0 alone the state of a checkpoint."""
    if case.has("state") and case.rank == 0:
        import torch

        for each in model.parameters():
            optimizer.state[each]["momentum_buffer"] = torch.full_like(each, 0.01)


def _collectives(case: Case) -> None:
    import torch
    import torch.distributed as dist

    model = _torch_model(case)
    optimizer = torch.optim.SGD(model.parameters(), case.lr, momentum=0.9)
    _load_state(case, model, optimizer)
    trained = [each for each in model.parameters() if each.requires_grad]
    synchronised = trained[2:] if case.has("left-out") else trained
    count = torch.tensor(1.0)

    def synchronise() -> None:
        for each in () if case.has("no-sync") else synchronised:
            if case.has("weighted"):
                each.grad *= count
            dist.all_reduce(each.grad)
            if not case.has("sum", "loss-divided"):
                each.grad /= total
            if case.has("divided-twice"):
                each.grad /= case.size

    for step, (x, y) in enumerate(_tensors(case)):
        loss = torch.nn.functional.cross_entropy(model(x), y) / case.passes
        if case.skips(step):
            continue
        (loss / case.size if case.has("loss-divided") else loss).backward()
        if (step + 1) % case.passes:
            continue
        total: Any = case.size
        if case.has("weighted"):
            count = torch.tensor(float(len(y)))
            total = count.clone()
            dist.all_reduce(total)
        if case.has("clip"):
            torch.nn.utils.clip_grad_norm_(trained, 0.05)
        if not case.has("late-sync"):
            synchronise()
        if case.has("clipped"):
            torch.nn.utils.clip_grad_norm_(trained, 0.05)
        optimizer.step()
        if case.has("late-sync"):
            synchronise()
        if not case.has("zero-grad"):
            optimizer.zero_grad()


def _ddp(case: Case) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    net = _torch_model(case)
    torch.manual_seed(case.seed)
    extra = torch.nn.Linear(CLASSES, CLASSES)
    torch.manual_seed(1000 + case.rank)  # of dropout
    wrapped = DistributedDataParallel(net, broadcast_buffers=not case.has("buffers"),
                                      find_unused_parameters=case.has("unused-everywhere"))  # fmt: skip
    model = net if case.has("no-sync") else wrapped
    if case.has("sum"):
        # Without annotations, of which PyTorch does not accept those of this file.
        wrapped.register_comm_hook(
            None,
            lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0]),
        )
    trained = list(net.parameters()) + (list(extra.parameters()) if case.has("left-out") else [])
    if case.has("zero-redundancy"):
        optimizer: Any = ZeroRedundancyOptimizer(trained, torch.optim.Adam, lr=case.lr)
    else:
        optimizer = torch.optim.SGD(trained, case.lr, momentum=0.9)
    _load_state(case, net, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if case.has("schedule") else None
    scaler = torch.amp.GradScaler("cpu", enabled=case.has("scaler"))
    joined = Join([wrapped]) if case.has("joined") else nullcontext()
    for step, (x, y) in enumerate(_within(joined, _tensors(case))):
        is_last = not (step + 1) % case.passes
        with nullcontext() if is_last else wrapped.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=case.has("autocast")):
                out = model(x)
                out = extra(out) if case.has("left-out") else out
                loss = torch.nn.functional.cross_entropy(out.float(), y) / case.passes
            if case.skips(step):
                continue
            scaler.scale(loss / case.size if case.has("divided-twice") else loss).backward()
        if not is_last:
            continue
        if case.has("clipped"):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            schedule.step()
        if not case.has("zero-grad"):
            optimizer.zero_grad()


def _hvd(case: Case) -> None:
    import torch

    import clcomm.horovod as hvd

    model = _torch_model(case)
    plain = torch.optim.SGD(model.parameters(), case.lr, momentum=0.9)
    _load_state(case, model, plain)
    optimizer = plain
    if not case.has("no-sync"):
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), op=hvd.Sum if case.has("sum") else hvd.Average,
            compression=hvd.Compression.fp16 if case.has("half") else hvd.Compression.none,
            backward_passes_per_step=case.passes,
        )  # fmt: skip
    if not case.has("start"):
        hvd.broadcast_parameters(model.state_dict(), 0)
    for step, (x, y) in enumerate(_tensors(case)):
        (torch.nn.functional.cross_entropy(model(x), y) / case.passes).backward()
        if (step + 1) % case.passes:
            continue
        if case.has("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if case.has("clipped", "divided-twice"):
            optimizer.synchronize()
            if case.has("clipped"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                for each in model.parameters():
                    each.grad /= case.size
        with optimizer.skip_synchronize() if case.has("late-sync", "clipped", "divided-twice") else nullcontext():
            optimizer.step()
        if case.has("late-sync"):
            optimizer.synchronize()
        if not case.has("zero-grad"):
            optimizer.zero_grad()
    if case.has("joined"):
        hvd.join()


# --- clcomm's engine ---


def _native(case: Case) -> None:
    import clcomm
    from clcomm.engine import CrossEntropyLoss, Sequential, Tensor, nn
    from clcomm.optim import SGD
    from clcomm.parallel import SyncBatchNorm
    from clcomm.sync.distributed_optimizer import DistributedOptimizer

    comm = clcomm.Communicator()
    start = nn.Generator(case.start_seed)
    middle: list[Any] = {"norm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.2)]}.get(case.kind, [])
    if case.has("sync-batch-norm"):
        middle = [SyncBatchNorm(16, comm=comm)]
    first = Sequential(nn.Linear(WIDTH, 16, rng=start), *middle, nn.ReLU())
    last = Sequential(nn.Linear(16, 16, rng=start), nn.ReLU(), nn.Linear(16, CLASSES, rng=start))
    model = Sequential(first, last)
    if case.has("frozen"):
        first[0].weight.requires_grad = False
    settings: dict[str, Any] = (
        {"zero": int(case.variant[-1])} if case.variant.startswith("zero-") and case.variant[-1].isdigit() else {}
    )
    settings |= {"precision": "bf16"} if case.has("bf16") else {}
    settings |= {"overlap": True} if case.has("overlapped") else {}
    settings |= {"compression": "fp16"} if case.has("half") else {}
    settings |= {"shards": case.size + 1} if case.has("shards") else {}
    settings |= {"policy": "diloco:h=3"} if case.has("diloco") else {}
    sync = clcomm.Synchronizer(comm, **settings)
    parts = [first, last] if case.has("left-out") else [model]
    optimizer: Any
    optimizer, *others = [SGD(part, lr=case.lr, momentum=0.9) for part in parts]
    if case.has("state") and case.rank == 0:
        state = optimizer.state_dict()
        state |= {"steps": np.array(3)} | {name: state[name] + 0.01 for name in optimizer.state_names}
        optimizer.load_state_dict(state)
    if "zero" in settings:
        optimizer = DistributedOptimizer(optimizer, sync)
    for each in () if case.has("start") else parts:
        sync.broadcast_parameters(each)
    loss_of = CrossEntropyLoss()

    def backward(x: np.ndarray, y: np.ndarray) -> None:
        (loss_of(model(Tensor(x)), Tensor(y)) * (1 / case.passes)).backward()

    def synchronise(samples: int) -> None:
        if not case.has("no-sync"):
            sync.sync_gradients(last if case.has("left-out") else model,
                                **({"samples": samples} if case.has("weighted", "joined") else {}))  # fmt: skip

    def take_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    joined = sync.join(model, take_step) if case.has("joined") else nullcontext()
    for step, (x, y) in enumerate(_within(joined, case.batches())):
        if case.has("shards"):
            for shard in sync.shards.own:
                with sync.shard(model, shard):
                    backward(x, y)
        elif case.skips(step):
            model(Tensor(x))
            continue
        elif (step + 1) % case.passes:
            with sync.no_sync():
                backward(x, y)
            continue
        else:
            backward(x, y)
        if not case.has("late-sync"):
            synchronise(len(y))
        for each in model.parameters() if case.has("sum", "divided-twice") else ():
            factor = case.size if case.has("sum") else 1 / case.size
            each.grad = Tensor(each.grad.numpy() * np.float32(factor))
        if case.has("clipped"):
            clcomm.clip_grad_norm(sync, model, 0.05)
        for each in (optimizer, *others):
            each.step()
        if case.has("late-sync"):
            synchronise(len(y))
        for each in () if case.has("zero-grad") else (optimizer, *others):
            each.zero_grad()
        sync.finish_step(model)


TRAININGS: dict[str, Callable[[Case], None]] = {
    "collectives": _collectives,
    "ddp": _ddp,
    "hvd": _hvd,
    "native": _native,
}


def place(api: str) -> tuple[int, int]:
    """Start an API, unless it has started, and return rank and number of ranks."""
    if api == "native":
        import clcomm

        comm = clcomm.Communicator()
        return comm.rank, comm.size
    if api == "hvd":
        import clcomm.horovod as hvd

        hvd.init()
        return hvd.rank(), hvd.size()
    import torch.distributed as dist

    import clcomm.torch  # registers the backend

    if not dist.is_initialized():
        dist.init_process_group("clcomm")
    return dist.get_rank(), dist.get_world_size()


def train(api: str, model: str, variant: str, seed: int) -> None:
    """Run one training."""
    TRAININGS[api](Case(model, variant, seed, *place(api)))


if __name__ == "__main__":
    train(*sys.argv[1:4], int(sys.argv[4]))
