"""JAX on several ranks: collectives that jit and grad know, and the mean of gradients in buckets.

`grads = sync(jax.grad(loss)(params, batch))` within a jitted step is all that a training needs; docs/jax.md has one.

Import it before JAX makes its first array: it sets that programs run in the thread that calls them, in the order of
the calls, and limits JAX to the rank's share of the cores. Written for JAX 0.10, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host import usable_cores
from clcomm.base.host.launcher import local_place
from clcomm.base.units import parse_size
from clcomm.comm.collectives.arguments import check_op, check_root
from clcomm.comm.communicator import Communicator
from clcomm.sync.adapters.jax import Model, named

import jax  # isort: skip  # after clcomm.sync.adapters.jax, which tells the extra that is missing and a version that is not ours
from jax._src import xla_bridge  # isort: skip

__all__ = [
    "Handle", "Model", "all_gather", "all_reduce", "all_reduce_async", "broadcast", "reduce_scatter", "sync"
]  # fmt: skip

Tree = TypeVar("Tree")


def _prepare() -> None:
    if xla_bridge.backends_are_initialized() and jax.config._read("jax_cpu_enable_async_dispatch"):
        raise ArgumentError(
            "clcomm.jax: expected to be imported before JAX's first array, got it afterwards; import it at the top, or "
            "call jax.config.update('jax_cpu_enable_async_dispatch', False) before it"
        )
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    os.environ.setdefault("NPROC", str(max(len(usable_cores()) // max(local_place(None, None)[1], 1), 1)))


_prepare()

from clcomm.jax.collectives import AllGather, AllReduce, Broadcast, Collective, ReduceScatter, run  # noqa: E402  # noqa: E402
from clcomm.jax.ffi import SUPPORTED  # noqa: E402
from clcomm.jax.in_flight import (  # noqa: E402
    AllReduced,
    GradientMean,
    Start,
    Wait,
)


def all_reduce(tree: Tree, op: str = "sum", *, comm: Communicator | None = None) -> Tree:
    """Return a tree with each array reduced over the ranks, in rank order; the same bits on every rank.

    Args:
        tree: an array, or any tree of them, of the same shapes and dtypes on every rank.
        op: as `Communicator.all_reduce`'s; only of "sum" and "mean" gradients can be computed.
        comm: the ranks; by default all of the job, as for all of these functions.

    As in PyTorch's `torch.distributed.nn`, gradients are those of the sum of all ranks' losses: backward of a sum is
    a sum. Raises ArgumentError for dtypes and operations that cannot be reduced, and MismatchError on every rank where
    the ranks' arrays differ; within jit JAX raises an error of its own with that text.
    """
    used = _or_world(comm)
    return _map(AllReduce(used, op), tree, op)


@jax.tree_util.register_pytree_node_class
class Handle:
    """All-reduces in flight, of an array or a tree; a tree itself, which programs take and return."""

    def __init__(self, tickets: Sequence[Any], kinds: tuple[AllReduced, ...], structure: Any):
        self._tickets, self._kinds, self._structure = tuple(tickets), kinds, structure

    def wait(self) -> Any:
        """Return the tree with each array reduced; once for each handle, on every rank."""
        done = [run(Wait(kind), [each])[0] for kind, each in zip(self._kinds, self._tickets, strict=True)]
        return jax.tree.unflatten(self._structure, done)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arrays in it and the rest, for JAX."""
        return self._tickets, (self._kinds, self._structure)

    @classmethod
    def tree_unflatten(cls, rest: tuple[Any, ...], tickets: Sequence[Any]) -> Handle:
        """Return the handle again."""
        return cls(tickets, *rest)


def all_reduce_async(tree: Any, op: str = "sum", *, comm: Communicator | None = None) -> Handle:
    """Start the all-reduces of `all_reduce` in the background, with its arguments; `wait()` of the handle returns it.

    Any number may be in flight, and what the program computes in between needs not wait for the other ranks. Backward
    starts the gradients' all-reduces where it comes by the waits, and waits for them where it comes by the starts.
    Raises as `all_reduce`; a second `wait()` raises ArgumentError.
    """
    used = _or_world(comm)
    leaves, structure = jax.tree.flatten(tree)
    arrays = [_checked(leaf, op) for leaf in leaves]
    kinds = tuple(AllReduced(used, op, each.shape, np.dtype(each.dtype)) for each in arrays)
    tickets = [run(Start(kind), [each])[0] for kind, each in zip(kinds, arrays, strict=True)]
    return Handle(tickets, kinds, structure)


def all_gather(tree: Tree, *, comm: Communicator | None = None) -> Tree:
    """Return a tree with all ranks' arrays, each stacked in rank order: shape (world_size, *shape).

    Backward adds the ranks' gradients of this rank's array. Raises as `all_reduce`.
    """
    return _map(AllGather(_or_world(comm)), tree)


def reduce_scatter(tree: Tree, op: str = "sum", *, comm: Communicator | None = None) -> Tree:
    """Return a tree with block `rank` of each array's reduction over the ranks, along its first dimension.

    Backward gathers the blocks' gradients. Raises as `all_reduce`, and ArgumentError where the number of ranks does not
    divide a first dimension.
    """
    used = _or_world(comm)
    collective, mean = ReduceScatter(used, "sum" if op == "mean" else op), op == "mean"

    def block(array: Any) -> Any:
        if not array.ndim or array.shape[0] % used.size:
            raise ArgumentError(
                f"array: expected a first dimension that {used.size} ranks divide, got shape {array.shape}"
            )
        rows = array.reshape(used.size, array.shape[0] // used.size, *array.shape[1:])
        reduced = run(collective, [rows])[0]
        return reduced / used.size if mean else reduced

    return cast("Tree", jax.tree.map(lambda leaf: block(_checked(leaf, op)), tree))


def broadcast(tree: Tree, root: int = 0, *, comm: Communicator | None = None) -> Tree:
    """Return root's tree, such as a model's parameters, on every rank.

    Backward adds all ranks' gradients on root; those of the others are zero. Raises as `all_reduce`, and ArgumentError
    for a root that is no rank.
    """
    used = _or_world(comm)
    check_root(root, used.size)
    return _map(Broadcast(used, int(root)), tree)


def sync(grads: Tree, *, bucket_size: int | str | None = None, comm: Communicator | None = None) -> Tree:
    """Return the mean of the ranks' gradients, in buckets: the same bits as a Synchronizer's, at any size of them.

    float16 and bfloat16 are averaged in float32, and rounded once. JAX's gradients without values, `float0`, which
    whole numbers have, stay as they are.

    Args:
        grads: a tree of arrays of floating-point numbers, of the same shapes and dtypes on every rank.
        bucket_size: bytes, or text such as "4MiB"; None: the Communicator's.
        comm: the ranks; by default all of the job.

    Raises ArgumentError for other leaves, and MismatchError on every rank where the ranks' trees or sizes differ.
    """
    used = _or_world(comm)
    nbytes = used.bucket_size if bucket_size is None else parse_size(bucket_size)
    leaves, structure = jax.tree.flatten(grads)
    names = named(jax.tree.unflatten(structure, [np.empty(0)] * len(leaves)))
    arrays = {name: _checked(leaf) for name, leaf in zip(names, leaves, strict=True) if not _has_no_values(leaf)}
    if not arrays:
        return grads
    means = dict(zip(arrays, run(GradientMean(used, nbytes, [*arrays.items()]), [*arrays.values()]), strict=True))
    return cast(
        "Tree", jax.tree.unflatten(structure, [means.get(n, leaf) for n, leaf in zip(names, leaves, strict=True)])
    )


@cache
def _world() -> Communicator:
    return Communicator()


def _or_world(comm: Communicator | None) -> Communicator:
    return _world() if comm is None else comm


def _map(collective: Collective, tree: Tree, op: str = "sum") -> Tree:
    return cast("Tree", jax.tree.map(lambda leaf: run(collective, [_checked(leaf, op)])[0], tree))


def _has_no_values(leaf: Any) -> bool:
    return bool(getattr(leaf, "dtype", None) == jax.dtypes.float0)


def _checked(leaf: Any, op: str = "sum") -> Any:
    """Return a leaf as JAX's array; ArgumentError where JAX or the Communicator cannot have it as it is."""
    if _has_no_values(leaf):
        raise ArgumentError("array: expected a dtype that NumPy has or bfloat16, got float0, which has no values")
    if isinstance(leaf, (np.ndarray, np.generic)) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ArgumentError(
            f"array: expected a dtype that JAX keeps, got {leaf.dtype}; convert it, or set jax_enable_x64"
        )
    try:
        array = jax.numpy.asarray(leaf)
    except TypeError:
        raise ArgumentError(f"array: expected an array or a tree of them, got {type(leaf).__name__}") from None
    if array.dtype.name not in SUPPORTED:
        raise ArgumentError(f"array: expected a dtype that NumPy has or bfloat16, got {array.dtype}")
    known = check_op(op, np.empty(0, np.float32 if array.dtype == jax.numpy.bfloat16 else array.dtype))
    if known != op:  # what is traced is a name
        raise ArgumentError(f"op: expected the name {known!r}, got mpi4py's constant")
    return array
