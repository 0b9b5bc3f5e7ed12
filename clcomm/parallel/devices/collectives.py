"""Collectives over tensors on several devices of one process, in the devices' order: the bits of rank order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.transport.reduction import reduce_in_rank_order
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.tensor import INT32, Tensor

#: The operations of all_reduce.
OPS = ("sum", "mean", "min", "max", "prod")
#: Those that all_reduce_p2p does with kernels.
_ON_THE_DEVICE = ("sum", "mean")


def all_reduce(tensors: Sequence[Tensor], op: str = "sum", overlap: bool = False) -> list[Tensor]:
    """Replace each tensor by their elementwise sum, mean, minimum, maximum or product; return them.

    Each element is ((t0 + t1) + t2) + ..., computed on the host. Waits for the devices.

    Args:
        tensors: of one shape and dtype, on any devices.
        op: one of OPS; a mean of float32 only.
        overlap: copy the result to the devices at the same time, by a thread for each.

    Raises ArgumentError for anything else.
    """
    tensors = _alike(tensors)
    if op not in OPS:
        raise ArgumentError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if not tensors:
        return []
    if op == "mean" and tensors[0].dtype == INT32:
        raise ArgumentError("op: expected one of sum, min, max, prod for int32 tensors, got 'mean'")
    rows = [tensor.numpy().ravel() for tensor in tensors]
    total = np.empty_like(rows[0])
    reduce_in_rank_order(rows, total, op)
    _give(total.reshape(tensors[0].shape), tensors, overlap)
    return tensors


def all_reduce_p2p(tensors: Sequence[Tensor], op: str = "sum") -> list[Tensor]:
    """Do `all_reduce` by kernels, without the host, where all tensors share one OpenCL context.

    That is where they are on one Device. For other tensors, integers, and operations other than sum and mean it is
    `all_reduce`.
    """
    tensors = _alike(tensors)
    is_one = len({id(tensor.device.context) for tensor in tensors}) == 1
    if not is_one or op not in _ON_THE_DEVICE or tensors[0].dtype == INT32:
        return all_reduce(tensors, op)
    with no_grad():
        total = tensors[0] * 1.0
        for tensor in tensors[1:]:
            total = total + tensor
        if op == "mean":
            total = total / float(len(tensors))
    for tensor in tensors:
        tensor.device.copy(tensor.buffer, total.buffer, total.nbytes)
        tensor.note_write()
    return tensors


def broadcast(tensors: Sequence[Tensor], root: int = 0) -> list[Tensor]:
    """Give every tensor the values of tensor `root`; return them.

    Raises ArgumentError for tensors of several shapes or dtypes, and for a root that is none of them.
    """
    tensors = _alike(tensors)
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < len(tensors):
        raise ArgumentError(f"root: expected 0 to {len(tensors) - 1}, the index of a tensor, got {root!r}")
    _give(tensors[root].numpy(), [tensor for index, tensor in enumerate(tensors) if index != root], False)
    return tensors


def scatter(tensor: Tensor, chunks: int | Sequence[Device]) -> list[np.ndarray] | list[Tensor]:
    """Cut a tensor along its first dimension into parts of equal length, the first ones longer by one if they must be.

    chunks: their number, for arrays on the host; or Devices, for a tensor on each. Raises ArgumentError for more parts
    than the first dimension has elements.
    """
    count = chunks if isinstance(chunks, int) else len(chunks)
    length = tensor.shape[0] if tensor.shape else 0
    if isinstance(chunks, bool) or not 1 <= count <= length:
        raise ArgumentError(f"chunks: expected 1 to {length}, the first dimension of {tensor.shape}, got {count}")
    arrays = np.array_split(tensor.numpy(), count, axis=0)
    if isinstance(chunks, int):
        return arrays
    return [Tensor(array, device) for array, device in zip(arrays, chunks, strict=True)]


def gather(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the tensors' values on the host, one after another along the first dimension.

    Raises ArgumentError for no tensors, and for shapes that differ in another dimension or dtypes that differ.
    """
    tensors = _alike(tensors, 1)
    if not tensors or any(not each.shape for each in tensors):
        raise ArgumentError("tensors: expected at least one, of one dimension or more")
    return np.concatenate([each.numpy() for each in tensors])


def _give(values: np.ndarray, tensors: Sequence[Tensor], overlap: bool) -> None:
    """Copy values to tensors, one after another or by a thread for each."""
    if not overlap or len(tensors) < 2:
        for tensor in tensors:
            tensor.copy_from(values)
        return
    with ThreadPoolExecutor(len(tensors)) as threads:
        for done in [threads.submit(tensor.copy_from, values) for tensor in tensors]:
            done.result()


def _alike(tensors: Sequence[Tensor], first: int = 0) -> list[Tensor]:
    """Return the tensors as a list; ArgumentError unless dtypes, and shapes from dimension `first` on, are alike."""
    if isinstance(tensors, Tensor) or any(not isinstance(each, Tensor) for each in tensors):
        kinds = type(tensors).__name__ if isinstance(tensors, Tensor) else [type(each).__name__ for each in tensors]
        raise ArgumentError(f"tensors: expected a list of Tensors, got {kinds}")
    for index, each in enumerate(tensors):
        shape = tensors[0].shape
        if each.shape[first:] != shape[first:] or each.dtype != tensors[0].dtype:
            expected = f"[n, {', '.join(map(str, shape[1:]))}]" if first else shape
            raise ArgumentError(
                f"tensors[{index}]: expected {tensors[0].dtype} of shape {expected} as tensors[0], got {each.dtype} of "
                f"shape {each.shape}"
            )
    return list(tensors)
