"""Launches as stages: each is one kernel of all elementwise ones that need no sum between them, and then the sums.

A chain has the values of the launches that it replaces, bit by bit: each is a call of the same function of elements,
and a product and a sum of two calls are not contracted (`FLOATS` of fused.cl).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clcomm.engine.device import Device
from clcomm.engine.fusion.tracing import Kept, Launch, Symbol, TracedKernel
from clcomm.engine.ops.elements import TABLE
from clcomm.engine.program import Size
from clcomm.engine.tensor import Shape, Tensor, copy_into, empty

#: The operands of kernels that are whole numbers, booleans as a rule, and comparisons' kernels whose results are none.
_OF_WHOLE = ("equal_int", "not_equal_int", "less_int", "less_equal_int", "both", "either", "first", "float_of_int")
_WHOLE = {**dict.fromkeys(_OF_WHOLE, (0, 1)), "chosen": (0,), "masked": (1,)}
_OF_FLOATS = ("chosen", "masked", "float_of_int")
#: Kernels that have no function of lanes.
_APART = ("int_of_float", "mask_of_flags")
#: What looks at all lanes of a vector, also beyond the last element.
_OF_ALL_LANES = re.compile(r"\b(sine|cosine)_of\(")
#: The lanes of a vector, at most: what is repeated in whole vectors is loaded sooner, in a program of its own.
_MOST_LANES = 8
#: Numbers that stand in a kernel's text, as they shorten it; others are its arguments.
_LITERAL = {"0.0": "0.0f", "-0.0": "-0.0f", "1.0": "1.0f", "-1.0": "-1.0f"}


class Value:
    """The elements that memory holds at some time.

    Attributes:
        given: the number of the argument that it is; None: it is computed.
        stage: in which it is computed; in_chain: by that stage's chain, else after it.
        is_whole: whether a chain has it as whole numbers.
    """

    def __init__(self, count: int, given: int | None = None, stage: int = 0, in_chain: bool = False):
        self.count, self.given, self.stage, self.in_chain = count, given, stage, in_chain
        self.is_whole = False


class Operand(NamedTuple):
    """A value of which every element stands `every` times, and that again and again in a `cycle`; cycle 0: as it is."""

    value: Value
    every: int = 1
    cycle: int = 0


@dataclass(eq=False)
class Step:
    """A launch with values in place of memory; its args are Operands, Kept ones and numbers."""

    kernel: TracedKernel
    sizes: tuple[Size, Size | None]
    args: list[Any]
    result: Value

    @property
    def name(self) -> str:
        return self.kernel.name.removesuffix("_broadcast")

    @property
    def texts(self) -> tuple[str, ...]:
        """Its functions of lanes, but those of fused.cl."""
        is_listed = self.name.startswith("each_")
        return TABLE[self.name.removeprefix("each_")].texts() if is_listed else ()

    def values(self) -> list[Value]:
        return [each.value for each in self.args if isinstance(each, Operand)]

    def launch(self, device: Device, memory: dict[Value, Any], place: Callable[[Value], Any]) -> None:
        """Queue it by itself."""

        def found(arg: Any) -> Any:
            return (
                memory[arg.value] if isinstance(arg, Operand) else device.keep(*arg) if isinstance(arg, Kept) else arg
            )

        target = memory[self.result] = place(self.result)
        values, name = [found(each) for each in self.args], self.kernel.name
        if name == "add_into":  # others may read the sum so far
            if values[0] is target:
                del values[0]
            else:
                name = "add"
        kernel = device.kernel(self.kernel.file, name, **dict(self.kernel.options))
        device.launch(kernel, *self.sizes, target, *values)


class Stages:
    """Launches that run as few kernels.

    Args:
        launches: as traced.
        given: the memory of the arguments.
        wanted: the memory of the results.
        count: the elements of a chain.

    Attributes:
        reads: the numbers of the arguments that are read.
        programs: the chains' texts.
    """

    def __init__(
        self, launches: Sequence[Launch], given: Sequence[Symbol], wanted: Sequence[Symbol | None], count: int
    ):
        self._count = count
        self._given = [Value(symbol.count, number) for number, symbol in enumerate(given)]
        self._current = dict(zip(given, self._given, strict=True))  # by memory, while launches are read
        steps = [step for step in map(self._step, launches) if step is not None]
        self._results = [None if symbol is None else self._current[symbol] for symbol in wanted]
        del self._current
        steps = _needed(steps, [value for value in self._results if value is not None])
        self.reads = {value.given for step in steps for value in step.values() if value.given is not None}
        self._runs: list[Chain | Step] = []
        for stage in sorted({step.result.stage for step in steps}):
            chained, apart = [
                [step for step in steps if step.result.stage == stage and step.result.in_chain == in_chain]
                for in_chain in (True, False)
            ]
            if chained:
                read = {value for step in steps if step not in chained for value in step.values()}
                self._runs.append(Chain(chained, read.union(filter(None, self._results)), count))
            self._runs += apart
        self.programs = [run.file for run in self._runs if isinstance(run, Chain)]

    def run(self, device: Device, given: Sequence[Tensor], out: Callable[[int], Tensor]) -> list[Tensor | None]:
        """Queue all kernels and return the results; `out(number)` gives the tensor to write one to."""
        memory = {value: tensor.buffer for value, tensor in zip(self._given, given, strict=True)}
        found: dict[Value, Tensor] = {}

        def place(value: Value) -> Any:
            if value in self._results:
                target = found[value] = out(self._results.index(value))
            else:
                target = empty(device, (value.count,))
            return target.buffer

        for run in self._runs:
            run.launch(device, memory, place)
        return [self._result(number, given, found, out) for number in range(len(self._results))]

    def _result(
        self, number: int, given: Sequence[Tensor], found: dict[Value, Tensor], out: Callable[[int], Tensor]
    ) -> Tensor | None:
        value = self._results[number]
        if value is None:
            return None
        if value.given is not None:
            return given[value.given]
        if number == self._results.index(value):
            return found[value]
        target = out(number)  # of several results with the same elements each has its own memory
        copy_into(target, found[value])
        return target

    def _step(self, launch: Launch) -> Step | None:
        kernel, (target, *args) = launch.kernel, launch.args
        written = _memory(target)
        if kernel.name == "copy":
            self._current[written] = self._current[_memory(args[0])]
            return None
        if kernel.name == "add_into":
            args = [target, *args]
        is_long = written.count == self._count and kernel.is_elementwise and kernel.name not in _APART
        operands = self._chained(kernel.name, args, target) if is_long else None
        in_chain = operands is not None
        if operands is None:
            operands = [self._operand(each) for each in args]
        before = [each.value for each in operands if isinstance(each, Operand)]
        follows = [each.stage + (in_chain and not each.in_chain and each.given is None) for each in before]
        result = self._current[written] = Value(written.count, None, max([int(in_chain), *follows]), in_chain)
        result.is_whole = kernel.file == "compare" and kernel.name not in _OF_FLOATS
        return Step(kernel, launch.sizes, operands, result)

    def _chained(self, name: str, args: list[Any], target: Tensor) -> list[Any] | None:
        """Return a step's operands and numbers in a chain; None where a chain cannot read them."""
        if name == "expand":
            args, shape = [args[0], *args[6:]], target.shape
        elif name.endswith("_broadcast"):
            args, shape = args[:2], target.shape
        else:
            args, shape = args[:-1], ()
        found = [self._operand(each, shape) for each in args]
        is_read = all(each is not None and not (isinstance(each, Kept) and not each.is_number) for each in found)
        return found if is_read else None

    def _operand(self, arg: Any, shape: Shape = ()) -> Any:
        """Return an argument with its value in place of memory; None if it is not repeated evenly in `shape`."""
        memory = _memory(arg)
        if not isinstance(memory, Symbol):
            return memory
        pattern = repetition(arg.shape, shape) if shape else (1, 0)
        return None if pattern is None else Operand(self._current[memory], *pattern)


def _memory(arg: Any) -> Any:
    return getattr(arg, "buffer", arg)


def repetition(shape: Shape, target: Shape) -> tuple[int, int] | None:
    """Return an Operand's (every, cycle) of a tensor broadcast to `target`; None if it is repeated otherwise."""
    if math.prod(shape) == math.prod(target):
        return 1, 0
    own = (1,) * (len(target) - len(shape)) + tuple(shape)
    kept = [d for d, n in enumerate(own) if n > 1]
    if not kept:
        return 1, 1
    first, last = kept[0], kept[-1]
    if own[first : last + 1] != target[first : last + 1]:
        return None
    every = math.prod(target[last + 1 :])
    return every, every * math.prod(own)


def _needed(steps: list[Step], results: list[Value]) -> list[Step]:
    """Return the steps on which results depend."""
    needed, found = set(results), []
    for step in reversed(steps):
        if step.result in needed:
            needed.update(step.values())
            found.append(step)
    return found[::-1]


class Chain:
    """A kernel of steps that follow each other on the same elements.

    Args:
        wanted: values that are to be in memory afterwards, among others.

    Attributes:
        file: what a device builds it from.
    """

    def __init__(self, steps: list[Step], wanted: set[Value], count: int):
        self._count = count
        own = {step.result for step in steps}
        self._out = [step.result for step in steps if step.result in wanted]
        operands = [arg for step in steps for arg in step.args if isinstance(arg, Operand) and arg.value not in own]
        self._in = list(dict.fromkeys(operands))
        self._names = {operand: f"x{number}" for number, operand in enumerate(self._in)}
        self._names |= {Operand(step.result): f"v{number}" for number, step in enumerate(steps)}
        self._numbers: list[float] = []
        functions = dict.fromkeys(text for step in steps for text in step.texts)
        self.file = "\n".join(["fused", *functions, self._text(steps)])

    def launch(self, device: Device, memory: dict[Value, Any], place: Callable[[Value], Any]) -> None:
        """Queue the kernel."""
        inputs = [memory[each.value] for each in self._in]
        for value in self._out:
            memory[value] = place(value)
        repeats = [number for each in self._in if each.cycle for number in each[1:]]
        args = [*(memory[value] for value in self._out), *inputs, *repeats, *self._numbers, 0, self._count]
        device.launch(device.kernel(self.file, "fused"), *device.grid(self._count), *args)

    def _text(self, steps: list[Step]) -> str:
        lines = [f"const lanes {self._names[each]} = {_load(number, each)};" for number, each in enumerate(self._in)]
        for step in steps:
            name, call = self._names[Operand(step.result)], f"{step.name}_lanes({', '.join(self._arguments(step))})"
            lines.append(f"const whole_lanes {name} = {call};" if step.result.is_whole else f"FLOATS({name}, {call});")
        for number, value in enumerate(self._out):
            name = self._names[Operand(value)]
            lines.append(f"store_lanes({f'AS_LANES({name})' if value.is_whole else name}, out{number} + i, left);")
        body = "".join(f"        {line}\n" for line in lines)
        places = "".join(f"    int at{number} = -1;\n" for number, each in enumerate(self._in) if each.cycle)
        return (
            f"__kernel void fused({', '.join(self._parameters())}) {{\n{places}    FOR_LANES(i, count) {{\n"
            f"        const int left = count - i;\n{body}    }}\n}}\n"
        )

    def _parameters(self) -> Iterator[str]:
        yield from (f"__global float *out{number}" for number, _ in enumerate(self._out))
        yield from (f"__global const float *in{number}" for number, _ in enumerate(self._in))
        yield from (f"int every{number}, int cycle{number}" for number, each in enumerate(self._in) if each.cycle)
        yield from (f"float n{number}" for number, _ in enumerate(self._numbers))
        yield from ("int nothing", "int count")

    def _arguments(self, step: Step) -> Iterator[str]:
        is_of_all = _OF_ALL_LANES.search("".join(step.texts))
        for index, arg in enumerate(step.args):
            is_whole = index in _WHOLE.get(step.name, ())
            if isinstance(arg, Kept):
                yield f"(whole_lanes)({arg.number})" if is_whole else f"(lanes)({self._number(float(arg.number))})"
            elif not isinstance(arg, Operand):
                yield self._number(arg)
            else:
                name = self._names[arg]
                if (name.startswith("v") and arg.value.is_whole) != is_whole:
                    name = f"AS_WHOLE({name})" if is_whole else f"AS_LANES({name})"
                yield f"present_lanes({name}, left)" if is_of_all else name

    def _number(self, number: float) -> str:
        if isinstance(number, int):
            return str(number)
        literal = _LITERAL.get(repr(number))
        if literal is None:
            self._numbers.append(number)
            literal = f"n{len(self._numbers) - 1}"
        return literal


def _load(number: int, operand: Operand) -> str:
    if not operand.cycle:
        return f"load_lanes(in{number} + i, left, 0.0f)"
    at = f"(at{number} = repeated_at(at{number}, i, cycle{number}))"
    if operand.every == operand.cycle:
        return f"(lanes)(in{number}[0])"
    if operand.every == 1 and operand.cycle % _MOST_LANES == 0:
        return f"load_lanes(in{number} + {at}, LANES, 0.0f)"
    if operand.every % _MOST_LANES == 0:
        return f"(lanes)(in{number}[{at} / every{number}])"
    return f"repeated_lanes(in{number}, {at}, left, every{number}, cycle{number})"
