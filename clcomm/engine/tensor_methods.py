"""A tensor's methods that compute; each calls the function of the same name."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.engine.tensor_functions import FunctionMethods
from clcomm.engine.tensor_in_place import InPlaceMethods
from clcomm.engine.tensor_shapes import AnyTensor


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
        self.requires_grad = requires_grad  # type: ignore[misc]
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
