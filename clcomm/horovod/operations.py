"""Horovod's operations on tensors: blocking, in place, and started to be completed later; on the ranks of a set.

Names are labels of the Communicator's stats. Unlike Horovod, which matches operations by their names, ranks call them
in the same order; where they do not, every rank raises the same MismatchError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError
from clcomm.horovod import handles, movement, world
from clcomm.horovod.compression import Compression
from clcomm.horovod.handles import Handle, synchronize
from clcomm.horovod.movement import ReduceOp
from clcomm.horovod.tensors import host_tensor, scaled
from clcomm.horovod.world import ProcessSet, global_process_set

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


def start(process_set: ProcessSet, work: Callable[[Communicator], Any]) -> Handle:
    """Queue an operation on a set's ranks."""
    world.require_all()
    return handles.start(partial(work, process_set.communicator()))


def chosen_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the operation of the arguments `op` and `average`, of which the second is Horovod's older one."""
    if op is not None and average is not None:
        raise ArgumentError("op: expected op or average, got both")
    if op is None:
        return Sum if average is False else Average
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"op: expected hvd.Average, Sum, Adasum, Min, Max or Product, got {op!r}")
    return op


def _onto(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return target.copy_(value)


def _listed(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise ArgumentError(f"tensors: expected a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


# --- all-reduce ---


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce of several tensors; `synchronize` returns the list of results.

    Args:
        tensors: of any dtypes, the same shapes on every rank; not to be changed until the operation is complete.
        average: True: op=Average; False: op=Sum. Use `op`.
        name: the label in stats and messages.
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor, postscale_factor: numbers by which the operands and the result are multiplied.
        process_set: the ranks.
    """
    wanted, sources = chosen_op(op, average), [host_tensor(each, "tensors") for each in _listed(tensors)]

    def work(comm: Communicator) -> list[torch.Tensor]:
        found = movement.all_reduce(comm, sources, wanted, name or "", prescale_factor, postscale_factor)
        return [each.to(tensor.device) for each, tensor in zip(found, tensors, strict=True)]

    return start(process_set, work)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce of several tensors in place; arguments as for `grouped_allreduce_async`."""
    wanted, targets = chosen_op(op, average), _listed(tensors)
    for each in targets:
        host_tensor(each, "tensors")

    def work(comm: Communicator) -> list[torch.Tensor]:
        sources = [host_tensor(each) for each in targets]
        found = movement.all_reduce(comm, sources, wanted, name or "", prescale_factor, postscale_factor)
        return [_onto(target, each) for target, each in zip(targets, found, strict=True)]

    return start(process_set, work)


class _GroupedAllreduce(torch.autograd.Function):
    """An all-reduce through which gradients flow: backward is the same all-reduce of them."""

    @staticmethod
    def forward(ctx: Any, arguments: dict[str, Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = arguments
        return tuple(synchronize(grouped_allreduce_async(tensors, **arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return (None, *synchronize(grouped_allreduce_async(gradients, **ctx.arguments)))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return several tensors' all-reduces; differentiable. compression: `Compression.fp16` sends halves."""
    arguments = {
        "op": chosen_op(op, average), "name": name, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor, "process_set": process_set,
    }  # fmt: skip
    small = [compression.compress(each) for each in _listed(tensors)]
    found = _GroupedAllreduce.apply(arguments, *(each for each, _ in small))
    return [compression.decompress(each, context) for each, (_, context) in zip(found, small, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks, in place, and return them."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _single(handle: Handle) -> Handle:
    """Let a handle of a group of one return its tensor instead of a list."""
    handle.take_first()
    return handle


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce; arguments as for `grouped_allreduce_async`, of one tensor."""
    return _single(grouped_allreduce_async([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an all-reduce in place; arguments as for `grouped_allreduce_async`, of one tensor."""
    return _single(
        grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a tensor's all-reduce; differentiable. Arguments as for `grouped_allreduce`, of one tensor."""
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, in place, and return it."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the sum, or with Average the mean, of sparse COO tensors: indices and values are gathered."""
    if op not in (Average, Sum):
        raise ArgumentError(f"op: expected Average or Sum for a sparse tensor, got {op}")
    own = tensor.detach().coalesce()

    def work(comm: Communicator) -> torch.Tensor:
        indices = movement.all_gather(comm, host_tensor(own.indices().t()), name or "")
        values = movement.all_gather(comm, host_tensor(own.values()), name or "")
        total = torch.sparse_coo_tensor(
            indices.t(), values, own.shape, device=own.device, check_invariants=True
        ).coalesce()
        return total / comm.size if op is Average else total

    return start(process_set, work)


# --- all-gather ---


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start gathering the ranks' tensors, which may differ in their first dimension; see `allgather`."""
    source, device = host_tensor(tensor), tensor.device
    return start(process_set, lambda comm: movement.all_gather(comm, source, name or "").to(device))


class _Allgather(torch.autograd.Function):
    """Backward is the part of the ranks' mean gradient that belongs to this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.shape, ctx.process_set = tensor.shape, process_set
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        rows = ctx.shape[0] if ctx.shape else 1
        mean = allreduce(gradient, op=Average, process_set=ctx.process_set)
        counts = allgather(torch.tensor([rows]), process_set=ctx.process_set)
        first = int(counts[: ctx.process_set.rank()].sum())
        return mean[first : first + rows].reshape(ctx.shape), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors, concatenated along the first dimension in rank order; differentiable.

    Raises MismatchError on every rank where they differ in dtype or in another dimension than the first.
    """
    return _Allgather.apply(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start gathering several tensors; `synchronize` returns the list of results."""
    given = _listed(tensors)
    sources = [host_tensor(each, "tensors") for each in given]

    def work(comm: Communicator) -> list[torch.Tensor]:
        gathered = (movement.all_gather(comm, each, name or "") for each in sources)
        return [each.to(tensor.device) for each, tensor in zip(gathered, given, strict=True)]

    return start(process_set, work)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several tensors' `allgather`; differentiable."""
    return [allgather(each, name, process_set) for each in _listed(tensors)]


# --- broadcast ---


def _root_in(process_set: ProcessSet, root_rank: int) -> int:
    ranks = process_set._require_added()
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ArgumentError(f"root_rank: expected one of the ranks {ranks}, got {root_rank!r}")
    return ranks.index(root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start sending root's tensor to all ranks of the set; root_rank is its rank in the world."""
    source, root, device = host_tensor(tensor), _root_in(process_set, root_rank), tensor.device
    return start(process_set, lambda comm: movement.broadcast(comm, [source], root, name or "")[0].to(device))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start replacing a tensor by root's."""
    host_tensor(tensor)
    root = _root_in(process_set, root_rank)

    def work(comm: Communicator) -> torch.Tensor:
        return _onto(tensor, movement.broadcast(comm, [host_tensor(tensor)], root, name or "")[0])

    return start(process_set, work)


class _Broadcast(torch.autograd.Function):
    """Backward is the ranks' mean gradient on root, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.root, ctx.process_set = root, process_set
        return synchronize(broadcast_async(tensor, root, name, process_set))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        mean = allreduce(gradient, op=Average, process_set=ctx.process_set)
        return mean if world.rank() == ctx.root else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return root's tensor on every rank; differentiable. Every rank gives one of the same shape and dtype."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace a tensor by root's, in place, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# --- all-to-all and reduce-scatter ---


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an exchange of rows; `synchronize` returns the rows received, and how many came from each rank (int32).

    splits: integers, how many rows go to each rank; None: equally many, where their number allows.
    """
    source = host_tensor(tensor)
    counts = _splits(source, splits, process_set.size())

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = movement.all_to_all(comm, source, counts, name or "")
        return rows.to(tensor.device), torch.tensor(received, dtype=torch.int32)

    return start(process_set, work)


def _splits(tensor: torch.Tensor, splits: Any, ranks: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if tensor.dim() == 0 or (splits is None and rows % ranks):
        raise ArgumentError(
            f"tensor: expected a first dimension that {ranks} ranks divide, or splits, got {list(tensor.shape)}"
        )
    counts = [rows // ranks] * ranks if splits is None else [int(each) for each in splits]
    if len(counts) != ranks or min(counts) < 0 or sum(counts) != rows:
        raise ArgumentError(f"splits: expected {ranks} numbers of rows, {rows} together, got {counts}")
    return counts


class _Alltoall(torch.autograd.Function):
    """Backward sends the gradients of the rows back to where these came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        rows, _received = synchronize(alltoall_async(gradient, ctx.received, process_set=ctx.process_set))
        return rows, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that the ranks send to this one, in rank order; differentiable.

    With `splits` also how many came from each rank; see `alltoall_async`.
    """
    rows, received = _Alltoall.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an all-reduce of which each rank gets its rows; see `reducescatter`."""
    return _single(grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter` of several tensors; `synchronize` returns the list of results."""
    wanted, given = chosen_op(op, None), _listed(tensors)
    sources = [host_tensor(each, "tensors") for each in given]
    if wanted is Adasum:
        raise ArgumentError("op: expected another than Adasum for a reduce-scatter, got Adasum")
    for each in sources:
        if each.dim() == 0:
            raise ArgumentError("tensor: expected at least one dimension to scatter, got a number")

    def work(comm: Communicator) -> list[torch.Tensor]:
        found = []
        for source, tensor in zip(sources, given, strict=True):
            rows = movement.reduce_scatter(comm, scaled(source, prescale_factor), wanted, name or "")
            found.append(scaled(rows, postscale_factor).to(tensor.device))
        return found

    return start(process_set, work)


class _Reducescatter(torch.autograd.Function):
    """Backward gathers the rows' gradients, for a sum times the number of ranks, as Horovod defines it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        ctx.arguments = arguments
        return synchronize(reducescatter_async(tensor, **arguments))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        process_set = ctx.arguments["process_set"]
        factor = ctx.arguments["prescale_factor"] * ctx.arguments["postscale_factor"]
        factor *= process_set.size() if ctx.arguments["op"] is Sum else 1
        return allgather(scaled(gradient, factor), process_set=process_set), None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor, in rank order; differentiable.

    Where the number of rows is no multiple of the ranks' the first ranks get one more.
    """
    arguments = {
        "name": name, "op": op, "process_set": process_set, "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }  # fmt: skip
    small, context = compression.compress(tensor)
    return compression.decompress(_Reducescatter.apply(small, arguments), context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return several tensors' `reducescatter`; differentiable."""
    return [
        reducescatter(each, name, compression, op, process_set, prescale_factor, postscale_factor)
        for each in _listed(tensors)
    ]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    synchronize(start(process_set, lambda comm: comm.barrier()))
