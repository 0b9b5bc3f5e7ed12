"""Types of numbers, flags and words that callers give to public functions, checked by the functions' signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.tensor import BOOL, FLOAT32, INT32, Shape, Tensor, empty, float_tensor, wrap
from clcomm.engine.tensor_methods import note_of

# --- Elements of another type, and operations that move elements of any type. ---


def to_float(x: Tensor) -> Tensor:
    """Return x as float32, 1 for true; x: of any type, itself where it is float32."""
    return x if x.dtype == FLOAT32 else cast(x, "float_of_int", FLOAT32)


def cast(x: Tensor, kernel: str, dtype: np.dtype) -> Tensor:
    """Queue kernel `kernel` of compare.cl, which gives elements another type; the result is not on the tape."""
    out = empty(x.device, x.shape, dtype)
    noted = [note_of(x.device)] if dtype == INT32 else []
    x.device.launch(x.device.kernel("compare", kernel), *x.device.grid(x.numel()), out, x, *noted, x.numel())
    return out


def moved(x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return operation(x) for one that only moves elements, which are four bytes each of all types."""
    if x.dtype == FLOAT32:
        return operation(x)
    result = operation(wrap(x.device, x.buffer, x.shape))
    return wrap(result.device, result.buffer, result.shape, x.dtype)


def dimension_of(name: str, shape: Shape, axis: object) -> int:
    """Return a dimension, which may count from the last one, from 0 on; ArgumentError for one that is not there."""
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ArgumentError(f"{name}: axis {shown(axis)} does not fit a tensor of shape {shape}")
    return axis % len(shape)


def of_any_type(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function that only moves elements take tensors of any one type, alone or in a sequence."""

    @wraps(function)
    def call(x: Any, *args: Any, **named: Any) -> Any:
        several = not isinstance(x, Tensor)
        x = _of_one_type(x) if several else x
        first = x[0] if several and isinstance(x, (list, tuple)) and x else x
        if not isinstance(first, Tensor) or first.dtype == FLOAT32:
            return function(x, *args, **named)
        dtype = first.dtype
        if several and any(not isinstance(each, Tensor) or each.dtype != dtype for each in x):
            return function(x, *args, **named)  # which names the one that is not float32
        floats = [wrap(each.device, each.buffer, each.shape) for each in (x if several else [x])]
        result: Any = function(floats if several else floats[0], *args, **named)
        back = [wrap(each.device, each.buffer, each.shape, dtype) for each in _listed(result)]
        return back if isinstance(result, list) else back[0]

    return call


def _of_one_type(tensors: Any) -> Any:
    """Return tensors of several types as float32, or as int32 where there is none of float32."""
    types = {each.dtype for each in tensors if isinstance(each, Tensor)} if isinstance(tensors, (list, tuple)) else ()
    if len(types) < 2:
        return tensors
    if FLOAT32 not in types:
        return [wrap(each.device, each.buffer, each.shape, INT32) for each in tensors]
    return [to_float(each) for each in tensors]


def _listed(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


# --- Types of what callers give to public functions, checked by the functions' signatures. ---

#: What an annotation may name; a parameter with another name is not checked.
_SCALARS, _SEQUENCES = {"bool", "int", "float", "str", "None"}, {"np.ndarray", "tuple", "Sequence", "list", "Shape"}
_NAMES = _SCALARS | _SEQUENCES | {"Tensor"}


class _Wanted(NamedTuple):
    """A parameter's name, the kinds of values it takes, None for all, and types that need no second look."""

    name: str
    kinds: set[str] | None
    types: set[type]

    def refuse(self, function: str, value: Any) -> None:
        """Raise ArgumentError unless the value is of one of the kinds."""
        kind = _kind_of(value)
        if self.kinds is not None and kind not in self.kinds:
            takes = " or ".join(
                [f"a {name}" if name in ("Tensor", "sequence") else name for name in sorted(self.kinds)]
            )
            remedy = "; wrap arrays in Tensor(...)" if "Tensor" in self.kinds and kind == "sequence" else ""
            raise ArgumentError(f"{function}: {self.name}: expected {takes}, got {shown(value)}{remedy}")
        self.types.add(type(value))


def typed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that raises ArgumentError for scalars that its signature does not have.

    A flag is no number, as in PyTorch, where `x.sum(0, 1)` is an error. A function that takes nothing but tensors, or
    tensors and numbers, is returned itself: they are its own affair, and it is called in each step.
    """
    wanted = {each.name: (each.kind, _wanted(each)) for each in inspect.signature(function).parameters.values()}
    kinds = inspect.Parameter
    places = [own for kind, own in wanted.values() if kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = next((own for kind, own in wanted.values() if kind is kinds.VAR_POSITIONAL), None)
    named_ones = {own.name: own for _, own in wanted.values() if own.kinds}
    if rest is None and all(own.kinds is None or "Tensor" in own.kinds for own in named_ones.values()):
        return function
    named_ones |= {theirs: named_ones[ours] for theirs, ours in PYTORCH_NAMES.items() if ours in named_ones}
    first, count = next((at for at, own in enumerate(places) if own.kinds), len(places)), len(places)

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for value, own in zip(args[first:], places[first:], strict=False):
            if type(value) not in own.types:
                own.refuse(name, value)
        for value in args[count:]:
            if rest is None:
                raise ArgumentError(f"{name}: expected what follows {places[-1].name} by name, got {shown(value)}")
            if type(value) not in rest.types:
                rest.refuse(name, value)
        for key, value in named.items():
            found = named_ones.get(key)
            if found is not None and type(value) not in found.types:
                found.refuse(name, value)
        return function(*args, **named)

    return call


def _wanted(parameter: inspect.Parameter) -> _Wanted:
    names = [part.strip() for part in re.sub(r"\[[^]]*\]+", "", str(parameter.annotation)).split("|")]
    found = {name.removeprefix("builtins.") for name in names}
    if found - _NAMES or found == {"None"} or {"Tensor", "np.ndarray"} <= found:
        return _Wanted(parameter.name, None, set())
    more = ({"int"} if "float" in found else set()) | ({"bool"} if {"Tensor", "float"} <= found else set())
    return _Wanted(parameter.name, {"sequence" if name in _SEQUENCES else name for name in found} | more, set())


#: Each kind after those that its types are also instances of.
_KINDS: dict[str, Any] = {
    "None": type(None), "bool": (bool, np.bool_), "str": str, "Tensor": Tensor, "int": Integral, "float": Real,
    "sequence": (Sequence, np.ndarray),
}  # fmt: skip


def _kind_of(value: Any) -> str:
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), "")


def shown(value: Any) -> str:
    """Return a wrong argument for a message of one line: a scalar, or the type of what may be long."""
    return repr(value) if _kind_of(value) in _SCALARS else type(value).__name__


# --- PyTorch's names of arguments for NumPy's. ---

Result = TypeVar("Result")
PYTORCH_NAMES = {"dim": "axis", "keepdim": "keepdims", "input": "x"}


def pytorch_names(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that also takes `dim` for `axis`, `keepdim` for `keepdims` and `input` for `x`."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Result:
        for theirs in PYTORCH_NAMES.keys() & named.keys():
            if PYTORCH_NAMES[theirs] in named:
                raise ArgumentError(f"{function.__name__}: expected {theirs} or {PYTORCH_NAMES[theirs]}, got both")
            named[PYTORCH_NAMES[theirs]] = named.pop(theirs)
        return function(*args, **named)

    return call


# --- Arithmetic of integers: they are indices, classes and counts, few, and computed on the host. ---
# A step with such arithmetic waits for the queue, and is not replayed.

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floor_divide": np.floor_divide, "remainder": np.remainder,
    "trunc_divide": lambda a, b: (a - np.fmod(a, b)) // b, "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift,
}  # fmt: skip


def is_whole(x: object) -> bool:
    """Return whether x is a tensor of integers."""
    return isinstance(x, Tensor) and x.dtype.kind == "i"


def are_whole(a: object, b: object) -> bool:
    """Return whether both operands, of which one is a tensor of integers, have no fractions."""
    return all(isinstance(x, (int, np.integer)) or (isinstance(x, Tensor) and x.dtype in (INT32, BOOL)) for x in (a, b))


def floats(*operands: Any) -> list[Any]:
    """Return operands of which tensors are float32."""
    return [to_float(x) if isinstance(x, Tensor) else x for x in operands]


def of_integers(name: str, a: Any, b: Any) -> Tensor:
    """Return an operation of operands that `are_whole`; ArgumentError for x / 0, and for a result outside int32."""
    first, second = [x.numpy().astype(np.int64) if isinstance(x, Tensor) else np.int64(x) for x in (a, b)]
    if name in ("<<", ">>") and not np.all((second >= 0) & (second < 32)):
        raise ArgumentError(f"{name}: expected to shift by 0 to 31 bits, got {_text(b)}")
    if name in ("floor_divide", "remainder", "trunc_divide") and not np.all(second):
        raise ArgumentError(f"{name}: expected to divide by other integers than 0, got {_text(b)}")
    try:
        values = _OPERATIONS[name](first, second)
    except ValueError:
        raise ArgumentError(f"{name}: shapes {first.shape} and {second.shape} do not broadcast") from None
    return Tensor(values, a.device if isinstance(a, Tensor) else b.device)


def _text(operand: object) -> str:
    return f"a tensor of shape {operand.shape}" if isinstance(operand, Tensor) else repr(operand)


def shifted(name: str, a: Tensor, bits: Any) -> Tensor:
    """Return integers with their bits moved; ArgumentError for others, and for a result outside int32."""
    if not is_whole(a) or not are_whole(a, bits):
        raise ArgumentError(f"{name}: expected integers, got {a.dtype} and {type(bits).__name__}")
    return of_integers(name, a, bits)


def on_host(function: Any, x: Tensor, axis: int | Sequence[int] | None, keepdims: bool) -> Tensor:
    """Return NumPy's function of integers along dimensions.

    Raises ArgumentError for a dimension that x does not have, and for a result outside int32.
    """
    values = x.numpy()
    try:
        over = axis if axis is None or isinstance(axis, int) else tuple(axis) or None  # () is all, as PyTorch's
        values = function(values, axis=over, keepdims=keepdims)
    except ValueError:
        raise ArgumentError(f"axis {axis!r} does not fit a tensor of shape {x.shape}") from None
    return Tensor(values, x.device)


# --- NumPy's broadcasting: result shapes, index plans for the kernels, and launches with broadcast operands. ---


def broadcast_shape(name: str, a: Shape, b: Shape) -> Shape:
    """Return the shape of an operation on shapes `a` and `b`; raises ArgumentError, with both, if they do not fit."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ArgumentError(f"{name}: shapes {a} and {b} do not broadcast to each other") from None


@lru_cache(maxsize=1024)
def _plan(shape: Shape, a: Shape, b: Shape) -> tuple[np.ndarray, int, int, int]:
    """Return (plan, outer, rows, inner) for kernels that read `a` and `b` broadcast to `shape`; see elementwise.cl.

    Neighbouring dimensions are merged where both operands allow it, so that the inner loop is as long as possible.
    """
    if any(broadcast_shape("broadcast", shape, each) != shape for each in (a, b)):
        raise ArgumentError(f"broadcast: shapes {a} and {b} do not give {shape}")
    sizes: list[int] = []
    strides: list[list[int]] = []
    for size, *steps in zip(shape, _strides(a, shape), _strides(b, shape), strict=True):
        if size == 1:
            continue
        if sizes and all(above == step * size for above, step in zip(strides[-1], steps, strict=True)):
            sizes[-1] *= size
            strides[-1] = list(steps)
        else:
            sizes.append(size)
            strides.append(list(steps))
    if not sizes:
        sizes, strides = [1], [[1, 1]]
    *outer, inner = sizes
    a_strides, b_strides = zip(*strides, strict=True)
    values = [*outer, *a_strides[:-1], *b_strides[:-1], a_strides[-1], b_strides[-1]]
    return np.array(values, np.int32), len(outer), int(np.prod(outer, dtype=np.int64)), inner


def _strides(shape: Shape, target: Shape) -> list[int]:
    """Return the strides, in elements, with which `shape` is read as `target`; 0 where it is broadcast."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(0 if size == 1 else step)
        step *= size
    return [0] * (len(target) - len(shape)) + strides[::-1]


def launch_broadcast(name: str, out: Tensor, a: Tensor, b: Tensor, *numbers: float, file: str = "elementwise") -> None:
    """Queue kernel `name` of a file with `a` and `b` broadcast to `out`'s shape."""
    device = out.device
    if 0 in out.shape:
        return
    _, outer, rows, inner = _plan(out.shape, a.shape, b.shape)
    grid = device.row_grid(rows, inner) if device.is_cpu else device.grid(rows * inner)
    plan = _plan_buffer(device, out.shape, a.shape, b.shape)
    device.launch(device.kernel(file, name), *grid, out, a, b, plan, outer, rows, inner, *numbers)


def binary(name: str, out: Tensor, a: Tensor, b: Tensor, file: str = "elementwise") -> Tensor:
    """Queue out = a <name> b, which broadcast to its shape, and return out."""
    if a.shape == b.shape:
        device, size = out.device, out.numel()
        device.launch(device.kernel(file, name), *device.grid(size), out, a, b, size)
    else:
        launch_broadcast(f"{name}_broadcast", out, a, b, file=file)
    return out


def pair(name: str, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return two tensors of one device, of which one is float32, as float32; raises ArgumentError for others."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype and FLOAT32 in (a.dtype, b.dtype):
        a, b = to_float(a), to_float(b)
    a, b = float_tensor(name, a), float_tensor(name, b)
    if a.device is not b.device:
        raise ArgumentError(f"{name}: expected tensors of one device, got {a.device.name} and {b.device.name}")
    return a, b


def _plan_buffer(device: Device, shape: Shape, a: Shape, b: Shape) -> object:
    return device.keep(("broadcast", shape, a, b), lambda: _plan(shape, a, b)[0])


def expand(x: Tensor, shape: Shape, divisor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return x / divisor broadcast to `shape`, not on the tape; written to `out` if given."""
    out = empty(x.device, shape) if out is None else out
    if x.shape == shape:
        device, size = x.device, x.numel()
        device.launch(device.kernel("elementwise", "divide_by"), *device.grid(size), out, x, divisor, size)
    else:
        launch_broadcast("expand", out, x, x, divisor)
    return out


def broadcast_axes(shape: Shape, target: Shape) -> Shape:
    """Return the dimensions of `target` along which a tensor of `shape` is repeated."""
    lead = len(target) - len(shape)
    return tuple([d for d, n in enumerate(target) if d < lead or (shape[d - lead] == 1 and n != 1)])
