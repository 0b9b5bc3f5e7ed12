"""Functions run on symbols: what they would launch, without launching it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import autograd
from clcomm.engine.device import Device
from clcomm.engine.modes import afresh
from clcomm.engine.program import Size
from clcomm.engine.tape import nodes_before
from clcomm.engine.tensor import FLOAT32, Shape, Tensor, wrap

#: The kernels whose first argument is all that they write to: those of elements by file, which a chain consists of, and
#: sums, which run between chains.
ELEMENTWISE = frozenset({"elementwise", "compare", "lane_functions"})
_SUMS = "reduce"


class Symbol:
    """The memory of a traced tensor."""

    def __init__(self, count: int):
        self.count = count
        self.written_at = -1


class Kept(NamedTuple):
    """A buffer of constants of the device's."""

    key: Any
    make: Callable[[], np.ndarray]

    @property
    def is_number(self) -> bool:
        """Whether it holds one number, which is in its key."""
        return self.key[0] in ("constant", "whole")

    @property
    def number(self) -> Any:
        return self.key[1]


class TracedKernel(NamedTuple):
    """A kernel by its file, its name and its build options."""

    file: str
    name: str
    options: tuple[tuple[str, Any], ...]

    @property
    def is_elementwise(self) -> bool:
        return self.file.partition("\n")[0] in ELEMENTWISE


class Launch(NamedTuple):
    """A launch that was not queued."""

    kernel: TracedKernel
    sizes: tuple[Size, Size | None]
    args: tuple[Any, ...]


class Tracing(Device):
    """A device like another that lists launches instead of queueing them.

    Args:
        function: its name in messages.
    """

    def __init__(self, device: Device, function: str):
        self.__dict__.update(vars(device))
        self.name, self._function = f"none (of {function}, which is fused: give it all tensors as arguments)", function
        self.launches: list[Launch] = []
        self.kept, self.random_stream, self.note = {}, None, None
        self.backward_ends, self._recorders = [], {}

    def kernel(self, file: str, name: str, **options: Any) -> Any:
        return TracedKernel(file, name, tuple(options.items()))

    def launch(self, kernel: Any, global_size: Size, local_size: Size | None, *args: object) -> None:
        if not kernel.is_elementwise and kernel.file != _SUMS:
            self.refuse(f"queues the kernel {kernel.name} of {kernel.file}.cl")
        self.launches.append(Launch(kernel, (global_size, local_size), args))

    def allocate(self, nbytes: int) -> Any:
        return Symbol(nbytes // FLOAT32.itemsize)

    def keep(self, key: object, make: Callable[[], np.ndarray]) -> Any:
        return Kept(key, make)

    def on_host(self, function: Callable[..., object], *args: object) -> None:
        self.refuse("runs a function on the host")

    def not_replayable(self, what: str) -> None:
        self.refuse(what)

    def refuse(self, what: str) -> NoReturn:
        """Raise ArgumentError for what a fused function cannot do."""
        raise ArgumentError(
            f"fused: {self._function}: expected operations on elements and sums of its arguments, but it {what}; leave "
            "that out of the function"
        )


class Given(NamedTuple):
    """What a traced function knows of a tensor that it is given."""

    shape: Shape
    dtype: np.dtype
    needs: bool
    whole_columns: int


class Trace(NamedTuple):
    """What a function of tensors launches.

    Attributes:
        forward: up to its result.
        backward: from there, and up to the gradients; empty if the result needs none.
        given: the arguments' memory, that of the result's gradient, and of what arguments had of theirs before.
        result: of the function.
        gradients: the memory of each argument's gradient; None: it has none.
        repeated: the arguments whose gradients are sums of several.
    """

    forward: list[Launch]
    backward: list[Launch]
    given: list[Symbol]
    result: Tensor
    gradients: list[Symbol | None]
    repeated: tuple[int, ...]


def trace(
    device: Device,
    name: str,
    function: Callable[[Sequence[Tensor]], Any],
    given: Sequence[Given],
    before: Sequence[int],
) -> Trace:
    """Return the launches of function(tensors) and of its backward, which adds to what the arguments `before` have.

    Raises ArgumentError where it does something else than launches of elements and sums.
    """
    tracing = Tracing(device, name)
    tensors = [_symbolic(tracing, each) for each in given]
    with afresh():
        result = function(tensors)
        if not isinstance(result, Tensor) or result.device is not tracing:
            tracing.refuse(f"returns {_described(result)}")
        if any(each.written_at >= 0 or each._node is not None for each in tensors):
            tracing.refuse("writes to an argument in place")
        forward, tracing.launches = tracing.launches, []
        memory = [each.buffer for each in tensors]
        uses = [0] * len(tensors)
        if result._requires_grad:
            for node in nodes_before(result._node)[0]:
                for x, needed in zip(node.inputs, node.needs, strict=True):
                    if needed:
                        uses = [n + (x is each) for n, each in zip(uses, tensors, strict=True)]
            seed = wrap(tracing, Symbol(result.numel()), result.shape)
            for index in before:
                tensors[index]._grad = wrap(tracing, Symbol(tensors[index].numel()), tensors[index].shape)
            memory += [seed.buffer, *(tensors[index]._grad.buffer for index in before)]  # type: ignore[union-attr]
            autograd.backward(result, seed)
    gradients = [None if each._grad is None else each._grad.buffer for each in tensors]
    repeated = tuple([index for index, n in enumerate(uses) if n > 1])
    return Trace(forward, tracing.launches, memory, result, gradients, repeated)


def _symbolic(tracing: Tracing, given: Given) -> Tensor:
    tensor = wrap(tracing, Symbol(math.prod(given.shape)), given.shape, given.dtype)
    tensor._requires_grad, tensor.whole_columns = given.needs, given.whole_columns
    return tensor


def _described(result: object) -> str:
    return f"a {type(result).__name__}" if not isinstance(result, Tensor) else "a tensor of another device"
