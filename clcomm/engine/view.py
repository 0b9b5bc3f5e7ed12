"""Views: tensors that are a part of another one's memory, in any shape, as PyTorch's; a write to either is the other's.

A view of all elements in their order has the same buffer. Another one has a copy, as kernels take contiguous memory: a
write to it goes to the memory that it is of, and it is read anew where that was written to since.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.engine.grad_slot import Gradient
from clcomm.engine.modes import enable_grad, modes, no_grad
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Shape, Tensor

if TYPE_CHECKING:
    from clcomm.engine.tensor import Tensor


class Block(NamedTuple):
    """A part of a tensor: the place of its first element, and its strides, in elements."""

    first: int
    strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def whole(shape: Shape) -> Block:
    """Return all of a tensor of `shape`."""
    return Block(0, tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))]))


class Source:
    """Where the elements of a view lie.

    Attributes:
        root: the tensor that has the memory, never a view.
        block: the view's part of it; None: all elements in their order, in the root's buffer.
        is_recorded: whether it has a place on the tape where the root has one: it is not a parameter's `data`, and
            was not taken in `no_grad` of a tensor on the tape.
        is_alone: whether no other tensor has its buffer.
        seen: the number of the device's last write before the view was read; NEVER: it is to be read at each use.
    """

    __slots__ = ("block", "is_alone", "is_recorded", "root", "seen")

    def __init__(self, root: Tensor, block: Block | None, is_recorded: bool, is_alone: bool):
        self.root, self.block, self.is_recorded, self.is_alone = root, block, is_recorded, is_alone
        self.seen: int = root.device.written_at if type(root) is not Gradient else NEVER


#: Before any write. Kernels add to gradients without a note, so that their views are read at each use.
NEVER = -2
_BUFFER, _NODE, _NEEDS = (vars(Tensor)[name] for name in ("buffer", "_node", "_requires_grad"))


class View(Tensor):
    """A tensor that `viewed` has made a part of another one."""

    __slots__ = ()

    @property
    def buffer(self) -> Any:
        """The root's buffer, or one with the values that the root has now."""
        source, device = self._source, self.device
        if source.block is None:
            return source.root.buffer
        if source.seen != device.written_at:
            self._read_if_stale()
        buffer = _BUFFER.__get__(self)
        if device._recorders and device.recorder is not None:
            device.recorder.note_part(buffer, source.root)
        return buffer

    @property
    def _node(self) -> Any:
        if self._source.seen != self.device.written_at:
            self._read_if_stale()
        return _NODE.__get__(self)

    @_node.setter
    def _node(self, node: Any) -> None:
        _NODE.__set__(self, node)

    @property
    def _requires_grad(self) -> bool:
        if self._source.seen != self.device.written_at:
            self._read_if_stale()
        return bool(_NEEDS.__get__(self))

    @_requires_grad.setter
    def _requires_grad(self, value: bool) -> None:
        _NEEDS.__set__(self, value)

    def _read_if_stale(self) -> None:
        source, root, now = self._source, self._source.root, self.device.written_at
        if source.seen == NEVER or root.written_at > source.seen:
            self._read()
        source.seen = now if type(root) is not Gradient else NEVER  # not after an error, which each read repeats

    def _read(self) -> None:
        source, root = self._source, self._source.root
        is_leaf = _NODE.__get__(self) is None and _NEEDS.__get__(self)
        on_tape = source.is_recorded and root._requires_grad and not is_leaf
        if source.block is None and not on_tape:
            return
        with enable_grad() if on_tape else no_grad():
            fresh = self._functional.taken_again(root, block=block_of(self), shape=self.shape)
        if source.block is not None:
            _BUFFER.__set__(self, fresh.buffer)
            source.is_alone = True
        if on_tape:
            _NODE.__set__(self, fresh._node)
            _NEEDS.__set__(self, True)

    @property
    def written_at(self) -> int:
        return root_of(self).written_at

    def note_write(self) -> None:
        self._source.root.note_write()

    def detach(self) -> Tensor:
        source, root = self._source, self._source.root
        own = root if isinstance(root, Parameter) else root.detach()
        source.is_alone = False
        return _made(super().detach(), Source(own, source.block, own is not root, False))

    def copy_from(self, array_like: Any) -> None:
        self._functional.write(self, self._array_of(array_like))

    @property
    def exports_copy(self) -> bool:  # type: ignore[override]
        return self._source.block is not None

    def is_contiguous(self) -> bool:
        """Return whether the elements are in their order, one behind the other, as PyTorch's would be."""
        return self.numel() < 2 or reshaped(self.shape, block_of(self).strides, (self.numel(),)) == (1,)

    def stride(self, dim: int | None = None) -> Any:
        """Return how many elements apart in the root neighbours along each dimension are, or along one."""
        steps = block_of(self).strides
        return steps if dim is None else steps[dim]

    def _pickled_as(self) -> type[Tensor]:
        return Tensor


def block_of(x: Tensor) -> Block:
    """Return where in its root the elements of a tensor lie."""
    return (x._source.block if type(x) is View else None) or whole(x.shape)


def root_of(x: Tensor) -> Tensor:
    """Return the tensor that has the memory of which `x` is a view, or else x."""
    root: Tensor = x._source.root if type(x) is View else x
    return root


def viewed(x: Tensor, taken: Tensor, block: Block | None) -> Tensor:
    """Make `taken`, which has the elements of x's root at `block`, a view of it, and return it.

    block: None: `taken` has x's elements in their order, and its buffer, as where x has a place for all of its own.
    """
    if type(taken) is not Tensor:  # a gradient, which finds its memory by itself
        return taken
    root, is_recorded = (x._source.root, x._source.is_recorded) if type(x) is View else (x, True)
    if block is None and (type(root) is not Tensor and type(root) is not Parameter):
        block = whole(taken.shape)
    return _made(taken, Source(root, block, is_recorded and (modes.recording or not root._requires_grad), True))


def _made(taken: Tensor, source: Source) -> Tensor:
    taken.__class__ = View
    taken._source = source
    return taken


def following(parameter: Parameter, values: Tensor) -> Tensor:
    """Make a parameter's values a view of it that is not on the tape, and return them."""
    block = None if type(parameter) is Parameter else whole(parameter.shape)
    return _made(values, Source(parameter, block, False, True))


def reshaped(shape: Shape, strides: tuple[int, ...], wanted: Shape) -> tuple[int, ...] | None:
    """Return the strides of elements of `shape` and `strides` in another shape; None: they have none, so are copied."""
    if 0 in wanted:
        return whole(wanted).strides
    runs: list[list[int]] = []  # (number, stride) of what lies evenly, dimensions merged
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    steps: list[int] = []
    left, stride = 1, 1
    for size in reversed(wanted):
        if size != 1 and left == 1:
            if not runs:
                return None
            left, stride = runs.pop()
        if left % size:
            return None
        steps.append(stride)
        left, stride = left // size, stride * size
    return tuple(steps[::-1])
