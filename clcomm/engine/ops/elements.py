"""One table of functions of elements: each is an expression, from which kernels and gradients of every order come.

An expression is Python's: numbers, arguments, `+ - * /`, comparisons joined by `&` and `|`, `a if condition else b`,
and calls: of the table's functions, or of those of lane_functions.cl and OpenCL C, as one with its own name is. Its
order is that of the floats' operations. The gradient of an argument has `g`, that of the result, and may have `y`, the
result; it calls functions of the table alone, so that it has gradients in turn, which are derived from it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.reduce import folded
from clcomm.engine.ops.types import binary, broadcast_shape, expand, pair
from clcomm.engine.tensor import Tensor, empty, float_tensor

#: By the names of kernels, and so of calls with `each_` before them.
TABLE: dict[str, type[Elements]] = {}
LARGER, SMALLER = "a if (a != a) | (a > b) else b", "a if (a != a) | (a < b) else b"  # NaN where one is
#: What has a kernel of elementwise.cl, which reads tensors that broadcast as they are.
_BROADCASTING = {"a + b": "add", "a - b": "sub", "a * b": "mul", "a / b": "div", LARGER: "maximum", SMALLER: "minimum"}
_SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&", ast.BitOr: "|", ast.Lt: "<", ast.Gt: ">",
    ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


class Elements(Op):
    """A function of the table, of tensors that broadcast and of numbers; `settings` are the numbers."""

    keeps_columns = True
    name: str
    inputs: tuple[str, ...]
    numbers: tuple[str, ...]
    value: str
    #: Those of the inputs; none: they are derived.
    given: tuple[str, ...]
    #: The name of the result's gradient.
    seed: str
    #: The function whose program has the kernel, too.
    home: type[Elements]

    @classmethod
    def forward(cls, ctx: Context, *inputs: Tensor, settings: tuple[float, ...] = ()) -> Tensor:
        shape = inputs[0].shape
        for x in inputs[1:]:
            if x.shape != shape:
                shape = broadcast_shape(cls.name, shape, x.shape)
        y = cls.launch(empty(inputs[0].device, shape), *inputs, settings=settings)
        ctx.settings = settings
        if places := cls.places():
            given = (*inputs, y)
            ctx.saved = tuple([given[place] for place in places])
        return y

    @classmethod
    def backward(cls, ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for index, (needed, (sign, slope, read)) in enumerate(zip(ctx.needs, cls.ways(), strict=True)):
            full = None
            if needed and sign:
                full = folded(ctx, index, grad, sign)
            elif needed:
                out = ctx.out(index) if ctx.inputs[index].shape == grad.shape else empty(grad.device, grad.shape)
                full = slope.launch(out, grad, *[ctx.saved[place] for place in read], settings=ctx.settings)
                full = folded(ctx, index, full)
            found.append(full)
        return tuple(found)

    @classmethod
    def launch(cls, out: Tensor, *inputs: Tensor, settings: tuple[float, ...] = ()) -> Tensor:
        """Queue the kernel and return `out`."""
        device, size = out.device, out.numel()
        whole = [x if x.shape == out.shape else expand(x, out.shape) for x in inputs]
        kernel = device.kernel(cls.file(), f"each_{cls.name}")
        device.launch(kernel, *device.grid(size), out, *whole, *settings, size)
        return out

    @classmethod
    @cache
    def gradients(cls) -> tuple[str, ...]:
        """Return the expression of each input's gradient."""
        return cls.given or tuple([derived(cls.value, name, cls.seed) or "0" for name in cls.inputs])

    @classmethod
    @cache
    def kept(cls) -> tuple[str, ...]:
        """Return the names of inputs, and `y` of the result, that gradients read."""
        return tuple([n for n in _names(cls.inputs) if any(_reads(text, n) for text in cls.gradients())])

    @classmethod
    @cache
    def places(cls) -> tuple[int, ...]:
        """Return the places of these among the inputs and the result."""
        return tuple([(*cls.inputs, "y").index(name) for name in cls.kept()])

    @classmethod
    @cache
    def slope(cls, index: int, again: bool = False) -> type[Elements]:
        """Return the gradient of an input as a function of the result's, and of what it reads: `again` inputs alone."""
        text = cls.gradients()[index]
        if again and "y" not in cls.inputs:
            text = _replaced(text, {"y": f"{cls.name}({', '.join((*cls.inputs, *cls.numbers))})"})
        read = [name for name in _names(cls.inputs) if _reads(text, name)]
        name = f"{cls.name}_by_{cls.inputs[index]}" + "_again" * again
        found = elements(name, (cls.seed, *read), cls.numbers, text)
        found.home = cls if cls.given and not again else found
        return found

    @classmethod
    @cache
    def ways(cls) -> tuple[tuple[float, type[Elements], tuple[int, ...]], ...]:
        """Return of each input's gradient the sign with which it is the result's, or 0; its function; what that reads.

        What it reads: the places among the values that are kept.
        """
        slopes = [cls.slope(index) for index, _ in enumerate(cls.inputs)]
        signs = [{cls.seed: 1.0, f"-{cls.seed}": -1.0}.get(text, 0.0) for text in cls.gradients()]
        read = [tuple([cls.kept().index(name) for name in slope.inputs[1:]]) for slope in slopes]
        return tuple(zip(signs, slopes, read, strict=True))

    @classmethod
    @cache
    def is_step(cls) -> bool:
        """Return whether the gradients' own gradients are 0 for what they read."""
        return not any(derived(text, name, "1") for text in cls.gradients() for name in cls.kept())

    @classmethod
    @cache
    def file(cls) -> str:
        """Return what a device builds the kernel from, with its gradients': lane_functions.cl, and text after it."""
        if cls.home is not cls:
            return cls.home.file()
        own = [cls, *(cls.slope(index) for index, _ in enumerate(cls.given))]
        functions = dict.fromkeys(text for each in own for text in each.texts())
        return "\n".join(["lane_functions", *functions, *(each.kernel() for each in own)])

    @classmethod
    def kernel(cls) -> str:
        pointers = "".join(f", __global const float *restrict {name}" for name in cls.inputs)
        numbers = "".join(f", float {name}" for name in cls.numbers)
        values = ", ".join([*(f"load_lanes({name} + at, count - at, 0.0f)" for name in cls.inputs), *cls.numbers])
        return (
            f"__kernel void each_{cls.name}(__global float *restrict out{pointers}{numbers}, int count) {{\n"
            f"    FOR_LANES(at, count) store_lanes(each_{cls.name}_lanes({values}), out + at, count - at);\n}}\n"
        )

    @classmethod
    @cache
    def texts(cls) -> tuple[str, ...]:
        """Return its function of lanes, after those that it calls."""
        called = re.findall(r"\beach_(\w+)_lanes\(", value := _in_c(_parsed(cls.value), cls.name))
        arguments = ", ".join([*(f"lanes {name}" for name in cls.inputs), *(f"float {name}" for name in cls.numbers)])
        own = f"INLINE lanes each_{cls.name}_lanes({arguments}) {{ return (lanes)({value}); }}"
        return tuple(dict.fromkeys([*(text for name in called for text in TABLE[name].texts()), own]))


class Broadcasting(Elements):
    """A function of two tensors that has a kernel of elementwise.cl, which reads them as they are."""

    kernel_name: str
    is_turned: bool
    #: Whether gradients read the inputs.
    saves: bool

    @classmethod
    def forward(cls, ctx: Context, *inputs: Tensor, settings: tuple[float, ...] = ()) -> Tensor:
        a, b = inputs[::-1] if cls.is_turned else inputs
        ctx.settings = settings
        if cls.saves:
            ctx.saved = inputs
        shape = a.shape if a.shape == b.shape else broadcast_shape(cls.name, a.shape, b.shape)
        return binary(cls.kernel_name, empty(a.device, shape), a, b)

    @classmethod
    def launch(cls, out: Tensor, *inputs: Tensor, settings: tuple[float, ...] = ()) -> Tensor:
        a, b = inputs[::-1] if cls.is_turned else inputs
        return binary(cls.kernel_name, out, a, b)


def _broadcasting(inputs: tuple[str, ...], value: str) -> dict[str, Any] | None:
    """Return the attributes of a Broadcasting function; None: it is none."""
    for is_turned, names in enumerate(("ab", "ba") if len(inputs) == 2 else ()):
        own = _replaced(value, dict(zip(inputs, names, strict=True)))
        kernel_name = _BROADCASTING.get(ast.unparse(_parsed(own)))
        if kernel_name is not None:
            return {"kernel_name": kernel_name, "is_turned": bool(is_turned)}
    return None


def elements(name: str, inputs: tuple[str, ...], numbers: tuple[str, ...], value: str, *given: str) -> type[Elements]:
    """Return a function of the table."""
    title, seed = "".join(part.title() for part in name.split("_")), "g"
    while seed in inputs:
        seed += "_"
    attributes = {"name": name, "inputs": inputs, "numbers": numbers, "value": value, "given": given, "seed": seed}
    shared = None if numbers else _broadcasting(inputs, value)
    base = Elements if shared is None else Broadcasting
    made: Any = type(title, (base,), {**attributes, **(shared or {}), "__doc__": value})
    made.home = TABLE[name] = made
    if shared is not None:
        made.saves = bool(made.kept())
    return TABLE[name]


def _names(inputs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*inputs, "y")))


def of_elements(value: str, *gradients: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Let a function, of which only the name and the arguments count, be one of the table."""

    def made(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        signature, name = inspect.signature(function), function.__name__
        tensors = tuple([each.name for each in signature.parameters.values() if each.annotation == "Tensor"])
        numbers = tuple([each for each in signature.parameters if each not in tensors])
        op = elements(name, tensors, numbers, value, *gradients)

        @wraps(function)
        def of_one(x: Tensor) -> Tensor:
            return op.apply(float_tensor(name, x))

        @wraps(function)
        def of_several(*args: Any, **named: Any) -> Tensor:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            given = [bound.arguments[each] for each in tensors]
            given = [float_tensor(name, given[0])] if len(given) == 1 else list(pair(name, *given))
            return op.apply(*given, settings=tuple([float(bound.arguments[each]) for each in numbers]))

        return of_several if numbers or len(tensors) > 1 else of_one

    return made


@cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _reads(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b(?!\()", text) is not None


def _replaced(text: str, values: dict[str, str]) -> str:
    return re.sub(
        r"\b[a-z]\w*\b(?!\()", lambda found: f"({values[found[0]]})" if found[0] in values else found[0], text
    )


def _in_c(node: Any, own: str) -> str:
    """Return an expression of the function `own` in OpenCL C."""
    match node:
        case ast.Constant():
            return f"{float(ast.unparse(node))!r}f"
        case ast.Name():
            return str(node.id)
        case ast.UnaryOp():
            return f"(-{_in_c(node.operand, own)})"
        case ast.BinOp():
            return f"({_in_c(node.left, own)} {_SIGNS[type(node.op)]} {_in_c(node.right, own)})"
        case ast.Compare():
            return f"({_in_c(node.left, own)} {_SIGNS[type(node.ops[0])]} {_in_c(node.comparators[0], own)})"
        case ast.IfExp():
            condition, *both = (_in_c(each, own) for each in (node.test, node.body, node.orelse))
            return f"({condition} ? (lanes)({both[0]}) : (lanes)({both[1]}))"
    name = node.func.id
    name = f"each_{name}_lanes" if name in TABLE and name != own else name
    return f"{name}({', '.join(_in_c(each, own) for each in node.args)})"


@cache
def derived(text: str, name: str, seed: str) -> str:
    """Return the derivative of an expression for a name, times the seed; "": 0."""
    node: Any = _parsed(text)

    def of(part: ast.expr) -> str:
        return derived(ast.unparse(part), name, seed)

    match node:
        case ast.Constant() | ast.Name():
            return seed if ast.unparse(node) == name else ""
        case ast.UnaryOp():
            return of(node.operand) and f"-({of(node.operand)})"
        case ast.IfExp():
            body, other = of(node.body), of(node.orelse)
            return f"({body or 0}) if {ast.unparse(node.test)} else ({other or 0})" if body or other else ""
        case ast.Call():
            op = TABLE[ast.unparse(node.func)]
            values = dict(zip((*op.inputs, *op.numbers), map(ast.unparse, node.args), strict=True))
            inner = {each: derived(values[each], name, seed) for each in op.inputs}
            return " + ".join([
                f"({_replaced(text, {**values, 'y': ast.unparse(node), op.seed: inner[each]})})"
                for each, text in zip(op.inputs, op.gradients(), strict=True) if inner[each] and text != "0"
            ])  # fmt: skip
    left, right, first, second = of(node.left), of(node.right), ast.unparse(node.left), ast.unparse(node.right)
    match node.op:
        case ast.Mult():
            parts = [left and f"({left}) * ({second})", right and f"({first}) * ({right})"]
        case ast.Div():
            parts = [left and f"({left}) / ({second})", right and f"-({right}) * ({text}) / ({second})"]
        case ast.Sub():
            parts = [left and f"({left})", right and f"-({right})"]
        case _:
            parts = [left and f"({left})", right and f"({right})"]
    return " + ".join(filter(None, parts))
