"""`fused`: a function of tensors whose operations on elements run as one kernel forward, and as one backward."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper, wraps
from numbers import Real
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.fusion.stages import Stages
from clcomm.engine.fusion.tracing import Given, Launch, Trace, Tracing, trace
from clcomm.engine.modes import is_recording, no_grad
from clcomm.engine.tensor import Tensor, empty

#: Signatures that a function keeps for a device, and programs that it builds; beyond these it runs as it is.
_MOST_KEPT, _MOST_PROGRAMS = 64, 32
Result = TypeVar("Result")


class _Mode(threading.local):
    is_on = True


_mode = _Mode()


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within it this thread's fused functions run as they are, for who looks at the operations on the tape."""
    before, _mode.is_on = _mode.is_on, False
    try:
        yield
    finally:
        _mode.is_on = before


class _Place(int):
    """An argument that is a tensor: its number."""


class Call:
    """A function with its arguments, where the tensors are left out, which are not to be kept."""

    def __init__(self, function: Callable[..., Any], args: list[Any], names: tuple[str, ...]):
        self.function, self._args, self._names = function, args, names

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        filled = [tensors[each] if isinstance(each, _Place) else each for each in self._args]
        positional = len(filled) - len(self._names)
        return self.function(*filled[:positional], **dict(zip(self._names, filled[positional:], strict=True)))

    @property
    def name(self) -> str:
        return _name_of(self.function)

    @property
    def others(self) -> list[Any]:
        return [each for each in self._args if not isinstance(each, _Place)]


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


class Plan:
    """A call's kernels for tensors of given shapes.

    Attributes:
        backward: of the gradients; None: the result needs none.
        added: the same, added to what the arguments `repeated` have of theirs, where several parts follow each other.
        reads: the arguments that backward reads.
        programs: the texts of all chains.
        launches: how many the function has by itself.
    """

    def __init__(self, device: Device, call: Call, given: Sequence[Given]):
        from clcomm.engine.guards import (
            Guards,  # it looks at modules, whose functions may be fused
            noting_code,
        )

        self.call, ran = call, set[Any]()
        with noting_code(ran) as is_complete:
            traced = trace(device, call.name, call, given, ())
        self.guards = Guards(call.function, call.others, frozenset(ran) if is_complete else None)
        self.repeated = traced.repeated
        more = trace(device, call.name, call, given, self.repeated)
        change = self.guards.change() or self.guards.unreadable
        if change is None and _numbers(more) != _numbers(traced):
            change = "what differs from call to call"
        if change is not None:
            raise ArgumentError(f"fused: {call.name}: expected a function of its arguments, but it depends on {change}")
        self.launches = len(traced.forward)
        self.shape, self.dtype = traced.result.shape, traced.result.dtype
        self.whole_columns = traced.result.whole_columns
        count = max([_elements(each) for each in traced.forward], default=0)
        self.forward = Stages(traced.forward, traced.given[: len(given)], [traced.result.buffer], count)
        self.backward, self.added = _backward(traced, count), _backward(more, count) if self.repeated else None
        self.reads = sorted(each for each in self.backward.reads if each < len(given)) if self.backward else []
        self.programs = {file for each in (self.forward, self.backward, self.added) if each for file in each.programs}


def _backward(traced: Trace, count: int) -> Stages | None:
    if not traced.backward:
        return None
    return Stages([*traced.forward, *traced.backward], traced.given, traced.gradients, count)


def _numbers(traced: Trace) -> list[Any]:
    """Return the kernels of a function and the numbers that they get."""
    return [(each.kernel, [arg for arg in each.args if isinstance(arg, Real)]) for each in traced.forward]


def _elements(launch: Launch) -> int:
    target = launch.args[0]
    return getattr(target, "buffer", target).count if launch.kernel.is_elementwise else 0


class FusedOp(Op):
    """A function of tensors as its plan's kernels."""

    @staticmethod
    def forward(ctx: Context, *inputs: Tensor, plan: Plan) -> Tensor:
        ctx.plan, device = plan, inputs[0].device
        ctx.save(*[inputs[index] for index in plan.reads])
        (found,) = plan.forward.run(device, inputs, lambda _: empty(device, plan.shape, plan.dtype))
        assert found is not None
        found.whole_columns = plan.whole_columns
        return found

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        before = {index: ctx.taken(index) for index in plan.repeated if ctx.needs[index]}
        stages, given, places = plan.backward, [*ctx.inputs, grad], dict[int, Tensor]()
        for index, kept in zip(plan.reads, ctx.saved, strict=True):  # copies, where the input was overwritten
            given[index] = kept
        if any(each is not None for each in before.values()):
            stages = plan.added
            for index in plan.repeated:
                found = before.get(index)
                given.append(_nothing(ctx.inputs[index]) if found is None else found)
                if found is not None and ctx.is_leaf(index):
                    places[index] = found
        assert stages is not None
        return tuple(stages.run(grad.device, given, lambda index: places[index] if index in places else ctx.out(index)))


def _nothing(x: Tensor) -> Tensor:
    """Return zeros to which adding changes no bit."""
    device, size, zeros = x.device, x.numel(), empty(x.device, x.shape)
    device.launch(device.kernel("elementwise", "fill"), *device.grid(size), zeros, -0.0, size)
    return zeros


class Fused:
    """A function of tensors that runs as few kernels; see `fused`.

    Args:
        function: the function.
        strict: False: a function that cannot be fused runs as it is.
    """

    def __init__(self, function: Callable[..., Any], strict: bool = True):
        if not callable(function):
            raise ArgumentError(f"fused: expected a function, got {type(function).__name__}")
        update_wrapper(self, function)
        self._function, self._strict = function, strict
        self._plans: WeakKeyDictionary[Device, OrderedDict[object, Plan | None]] = WeakKeyDictionary()  # None: as it is
        self._programs: set[str] = set()

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **named: Any) -> Any:
        values = [*args, *named.values()]
        tensors = list({id(each): each for each in values if isinstance(each, Tensor)}.values())
        is_apart = bool(tensors) and _mode.is_on and not isinstance(tensors[0].device, Tracing)  # of a fused caller
        plan = self._plan(tensors, values, tuple(named)) if is_apart else None
        if plan is None:
            return self._function(*args, **named)
        if plan.backward is None:
            with no_grad():
                return FusedOp.apply(*tensors, plan=plan)
        return FusedOp.apply(*tensors, plan=plan)

    def _plan(self, tensors: list[Tensor], values: list[Any], names: tuple[str, ...]) -> Plan | None:
        """Return the plan for these arguments; None where the function runs as it is."""
        device, recording, places = tensors[0].device, is_recording(), {id(x): n for n, x in enumerate(tensors)}
        given = tuple([Given(x.shape, x.dtype, recording and x._requires_grad, x.whole_columns) for x in tensors])
        args = [_Place(places[id(each)]) if id(each) in places else each for each in values]
        key = given, tuple([(type(each), repr(each) if type(each) is float else each) for each in args]), names
        plans = self._plans.setdefault(device, OrderedDict())
        try:
            plan = plans.get(key)
        except TypeError:
            if not self._strict:
                return None
            name = _name_of(self._function)
            raise ArgumentError(f"fused: {name}: expected tensors and hashable values as arguments") from None
        if plan.guards.are_same() if plan is not None else key in plans:
            plans.move_to_end(key)
            return plan
        if any(x.device is not device or not math.prod(x.shape) for x in tensors):
            return None
        plan = plans[key] = self._made(device, Call(self._function, args, names), given)
        if len(plans) > _MOST_KEPT:
            plans.popitem(last=False)
        return plan

    def _made(self, device: Device, call: Call, given: Sequence[Given]) -> Plan | None:
        try:
            plan = Plan(device, call, given)
        except ArgumentError:
            if self._strict:
                raise
            return None
        programs = self._programs | plan.programs
        if plan.launches < 2 or not plan.forward.programs or len(programs) > _MOST_PROGRAMS:
            return None
        self._programs = programs
        return plan


def chained(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function of the engine's own that is fused where it can be."""
    own = Fused(function, strict=False)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Result:
        return own(*args, **named)  # type: ignore[no-any-return]

    return call


def fused(function: Callable[..., Any]) -> Fused:
    """Return a function of tensors that computes its operations on elements in one kernel, and their gradients in one.

    Results and gradients have the bits that the function has by itself. Backward computes again what forward had, so
    that no tensor but the arguments is kept for it. Sums are kernels of their own, between chains.

    Args:
        function: of tensors and hashable values, returns one tensor. It runs on symbols in the first call with given
            shapes, values and needs of gradients, and again when a value that it reads by name has changed.

    Raises:
        ArgumentError: in such a call, where the function does anything else than operations on elements and sums: it
            reads a value, draws random numbers, writes to an argument, or uses a tensor that is no argument.
    """
    return Fused(function)
