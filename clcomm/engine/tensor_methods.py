"""A tensor's methods that compute; each calls the function of the same name."""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.tensor_functions import FunctionMethods
from clcomm.engine.tensor_in_place import InPlaceMethods
from clcomm.engine.tensor_shapes import AnyTensor

if TYPE_CHECKING:
    import pyopencl as cl

    from clcomm.engine.device import Device


class Removable(NamedTuple):
    """A hook's handle: `remove()` ends it."""

    remove: Callable[[], None]


class TensorMethods(InPlaceMethods[AnyTensor], FunctionMethods[AnyTensor]):
    """The methods of Tensor, which derives from this class."""

    __slots__ = ()

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers; waits for the queue."""
        return self.numpy().tolist()  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: builtins.bool = True) -> AnyTensor:
        """Set `requires_grad`; return the tensor."""
        self.requires_grad = requires_grad
        return self  # type: ignore[return-value]

    def register_hook(self, hook: Callable[[AnyTensor], AnyTensor | None]) -> Removable:
        """Call `hook(gradient)` in each backward once the tensor's gradient is complete; a result stands for it.

        A leaf adds what results to its `grad`. A replayed step calls no hooks, as no Python. Returns a handle, whose
        `remove()` ends it. Raises ArgumentError for a tensor that needs no gradient.
        """
        if not self.requires_grad:
            raise ArgumentError("register_hook: expected a tensor that needs a gradient, got one that does not")
        node: Any = self._node  # type: ignore[attr-defined]
        if node is None:
            return Removable(self.register_post_accumulate_grad_hook(hook, planned=None))  # type: ignore[attr-defined]
        node.hooks = (*node.hooks, hook)

        def remove() -> None:
            node.hooks = tuple([each for each in node.hooks if each is not hook])

        return Removable(remove)

    def long(self) -> AnyTensor:
        """Return `int`: there are no longer integers."""
        return self._functional.to_int(self)

    def float(self) -> AnyTensor:
        """Return the tensor as float32: 1 for true."""
        return self._functional.to_float(self)

    def int(self) -> AnyTensor:
        """Return the tensor as int32, without fractions and gradient."""
        return self._functional.to_int(self)

    def bool(self) -> AnyTensor:
        """Return whether each element is not 0."""
        return self._functional.to_bool(self)

    def unfold(self, dimension: builtins.int, size: builtins.int, step: builtins.int) -> AnyTensor:
        """Return the windows of `size` along a dimension, as a last one. See `functional.windows`."""
        return self._functional.windows(self, dimension, size, step)

    def retain_grad(self) -> None:
        """Keep the gradient of an operation's result as its `grad`, added up over backwards, too."""

        own: Any = self

        def keep(gradient: Any) -> None:
            own._grad = gradient.clone() if own._grad is None else own._grad + gradient

        if own._node is not None:
            self.register_hook(keep)

    def isnan(self) -> AnyTensor:
        """Return whether each element is NaN."""
        return self._functional.not_equal_to(self, self)

    def isinf(self) -> AnyTensor:
        """Return whether each element is infinite."""
        return self._functional.equal_to(self._functional.abs(self), math.inf)

    def isfinite(self) -> AnyTensor:
        """Return whether each element is neither infinite nor NaN."""
        return self._functional.less_than(self._functional.abs(self), math.inf)


# --- A tensor's operators, as NumPy's and PyTorch's, but for those that are functions: see registry.py. ---


class _Comparing(threading.local):
    """Whether this thread compares tensors as objects, as those who look for a changed one do."""

    by_identity = False


comparing = _Comparing()


class TensorOperators(TensorMethods[AnyTensor]):
    """The operators of Tensor, which derives from this class."""

    __slots__ = ()

    if TYPE_CHECKING:

        def item(self) -> float | int: ...

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "ib":
            raise TypeError(f"index: expected a tensor of one whole number, got {self.dtype}")
        return int(self.item())

    def __format__(self, text: str) -> str:
        return format(self.item(), text) if not self.shape else object.__format__(self, text)

    def __eq__(self, other: object) -> Any:
        """Return whether each element is equal, as booleans; False for None. Raises ArgumentError for other types."""
        if other is None or comparing.by_identity:
            return self is other
        return self._functional.equal_to(self, other)

    def __ne__(self, other: object) -> Any:
        if other is None or comparing.by_identity:
            return self is not other
        return self._functional.not_equal_to(self, other)

    __hash__ = object.__hash__

    def __reversed__(self) -> AnyTensor:
        return self._functional.flip(self, 0)

    def __iter__(self) -> Iterator[AnyTensor]:
        """Yield the parts along the first dimension; raises TypeError for a tensor without dimensions."""
        return (self[number] for number in range(len(self)))  # type: ignore[arg-type]

    #: With a NumPy array on the left, Python calls the methods above, which raise an error.
    __array_ufunc__ = None


# --- Invalid class indices: rejected in host arrays before a kernel runs, else where the loss is used. ---
# Kernels do not read outside a row for such an index: the loss and the row's gradient are NaN, and the first one is
# noted in the device's memory.

#: The end of the message about a target outside the classes.
OUTSIDE = "targets must be 0 to {}, got {}"


def note_of(device: Device) -> cl.Buffer:
    """Return the buffer of invalid indices seen by a device's kernels: their number, one of them, and the classes,
    negative where they are of a table's rows or a dimension's elements."""
    if device.outside is None:
        device.outside = device.keep("outside", lambda: np.zeros(3, np.int32))
    buffer: cl.Buffer = device.outside
    return buffer


def require_below(said: str, given: Any, count: int, ignored: int | None = None, *, scores: Any = None) -> bool:
    """Raise ArgumentError unless all integers are from 0 to `count` - 1, or `ignored`.

    Args:
        said: the message, with places for the largest allowed one and the one that came.
        given: an array, or a tensor, of which the host may know the smallest and the largest.
        scores: what the integers are targets of; its gradients are not used before it is known that they are classes.

    Returns whether it is known that there are no others.
    """

    def rule(values: Sequence[int]) -> bool:
        for value in values:
            if not 0 <= value < count and value != ignored:
                raise ArgumentError(said.format(count - 1, value))
        return len(values) > 0 and values[-1] < count  # else it is ignored, and others may be below it

    if not isinstance(given, np.ndarray):
        is_known: bool = given.decided(rule)
        if not is_known and scores is not None and scores.requires_grad:
            given.device.in_doubt = True
            if given.device.recorder is not None:
                given.device.recorder.in_doubt = True
        return is_known
    outside = given[(given < 0) | (given >= count)]
    rule((outside if ignored is None else outside[outside != ignored])[:1].tolist())
    return True


def require_none_noted(device: Device) -> None:
    """Raise ArgumentError where a kernel has noted an index since the last call; waits for the queue."""
    device.in_doubt = False
    if device.outside is None:
        return
    noted = np.zeros(3, np.int32)
    device.read(device.outside, noted)
    if noted[0]:
        device.write(device.outside, np.zeros(3, np.int32))
        if not noted[2]:
            raise ArgumentError("int: expected floats within int32 to convert, got others, or NaN")
        if noted[2] < 0:
            raise ArgumentError(f"index: expected 0 to {-noted[2] - 1}, got {noted[1]}")
        raise ArgumentError(f"loss: {OUTSIDE.format(noted[2] - 1, noted[1])}")
