"""The gradients of operations as operations, so that they have gradients in turn.

A rule takes an operation's node and the gradient of its result, and returns those of its inputs, made of the operations
of `functional`. That costs more launches than the operations' own kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.autograd import Context, Op
from clcomm.engine.creation import ones_like
from clcomm.engine.ops import (
    batched_matmul,
    blocks,
    comparisons,
    conv2d,
    dropout,
    elementwise,
    indexing,
    loss,
    matmul,
    pool,
    shape,
    softmax,
)
from clcomm.engine.ops.elements import Elements
from clcomm.engine.ops.types import broadcast_axes
from clcomm.engine.tensor import Shape, Tensor

Gradients = tuple[Tensor | None, ...]
Rule = Callable[[Context, Tensor], Gradients]


def gradients(node: Context, grad: Tensor) -> Gradients:
    """Return the gradients of an operation's inputs, on the tape; ArgumentError for an operation without a rule."""
    if node.op.is_linear:
        return (Adjoint.apply(grad, node=node),)
    rule = _of_elements if issubclass(node.op, Elements) else OF_NODES.get(node.op) or OF_INPUTS.get(node.op)
    if rule is None:
        name = node.op.__name__.removesuffix("Op")
        raise ArgumentError(f"grad: create_graph: expected operations whose gradients have gradients, got {name}")
    return rule(node, grad)


def _of_elements(node: Context, grad: Tensor) -> Gradients:
    """Return the gradients of a function of the table, which are functions of it, too."""
    op: Any = node.op
    is_step = op.is_step()
    names, read = (op.kept(), [x.detach() for x in node.saved]) if is_step else (op.inputs, node.inputs)
    values = dict(zip(names, read, strict=True))

    def of(index: int) -> Tensor:
        sign = op.ways()[index][0]
        if sign:
            return summed_to(grad if sign > 0 else -grad, node.inputs[index].shape)
        slope = op.slope(index, again=not is_step)
        found = slope.apply(grad, *[values[name] for name in slope.inputs[1:]], settings=node.settings)
        return summed_to(found, node.inputs[index].shape)

    return tuple([of(index) if needed else None for index, needed in enumerate(node.needs)])


def summed_to(grad: Tensor, wanted: Shape) -> Tensor:
    """Return a gradient summed over the dimensions along which a tensor of `wanted` was repeated."""
    axes = broadcast_axes(wanted, grad.shape)
    return F.reshape(F.sum(grad, axes, True), wanted) if axes else F.reshape(grad, wanted)


def _of_one(rule: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Return the rule of an operation on one tensor from its gradient, of the result's and the input."""
    return lambda node, grad: (rule(grad, node.inputs[0]),)


def _passed(grad: Tensor, x: Tensor) -> Tensor:
    """Return ReLU's gradient: that of its result where x is positive or NaN."""
    return F.masked_fill(grad, x.detach() <= 0.0, 0.0)


def _softmax(grad: Tensor, x: Tensor) -> Tensor:
    value = F.softmax(x, -1)
    return value * (grad - F.sum(grad * value, -1, True))


def _matmul(node: Context, grad: Tensor) -> Gradients:
    a, b = node.inputs
    return F.matmul(grad, b.transpose(0, 1)), F.matmul(a.transpose(0, 1), grad)


def _linear(node: Context, grad: Tensor) -> Gradients:
    x, weight, _ = node.inputs
    activated = node.saved[2]
    if activated is not None:
        grad = _passed(grad, activated)
    dx, dw, db = node.needs
    return (
        F.matmul(grad, weight) if dx else None,
        F.matmul(grad.transpose(0, 1), x) if dw else None,
        F.sum(grad, 0) if db else None,
    )


def _batched(node: Context, grad: Tensor) -> Gradients:
    """dA = dC op(B)^T and dB = op(A)^T dC, turned where A and B are, and summed where they were broadcast."""
    turned = node.turned
    a, b = [x.transpose(-1, -2) if t else x for x, t in zip(node.inputs, turned, strict=True)]
    both = F.matmul(grad, b.transpose(-1, -2)), F.matmul(a.transpose(-1, -2), grad)
    values = [x.transpose(-1, -2) if t else x for x, t in zip(both, turned, strict=True)]
    return tuple([summed_to(value, x.shape) for value, x in zip(values, node.inputs, strict=True)])


def _weight_gradient(g: Any, x: Tensor, grad: Tensor, kernel: Shape) -> Tensor:
    """Return the gradient of a convolution's kernel: x convolved with the result's gradient, images as channels."""
    parts = []
    for own, up in zip(F.chunk(x, g.groups, 1), F.chunk(grad, g.groups, 1), strict=True):
        turned = own.transpose(0, 1), up.transpose(0, 1)
        apart, around = (g.apart_h, g.apart_w), (g.pad_h, g.pad_w)
        if len(set(apart)) > 1:
            raise ArgumentError(f"grad: create_graph: conv2d: expected one dilation for both directions, got {apart}")
        found = F.conv2d(*turned, None, apart[0], around, g.stride)
        parts.append(found[:, :, : kernel[2], : kernel[3]].transpose(0, 1))
    return parts[0] if len(parts) == 1 else F.concat(parts, 0)


def _conv2d(node: Context, grad: Tensor) -> Gradients:
    (x, weight, _), g = node.inputs, node.geometry
    dx = dw = None
    if node.needs[0]:
        dx = conv2d.ConvTranspose2dOp.apply(grad, weight, geometry=g)
    if node.needs[1]:
        dw = _weight_gradient(g, x, grad, weight.shape)
    return dx, dw, F.sum(grad, (0, 2, 3)) if node.needs[2] else None


def _conv_transpose2d(node: Context, grad: Tensor) -> Gradients:
    (x, weight), g = node.inputs, node.geometry
    dx = conv2d.Conv2dOp.apply(grad, weight, None, geometry=g) if node.needs[0] else None
    return dx, _weight_gradient(g, grad, x, weight.shape) if node.needs[1] else None


class Adjoint(Op):
    """The gradient of a linear operation as a function of the result's gradient; node: of that operation."""

    takes_none = True

    @staticmethod
    def forward(ctx: Context, grad: Tensor, *, node: Context) -> Tensor:
        ctx.of, ctx.arguments = node.op, {**node.attrs, **({"value": 0.0} if "value" in node.attrs else {})}
        (found,) = node.op.backward(node, grad)
        assert found is not None
        return found

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        return (ctx.of.forward(Context((grad,), (False,)), grad, **ctx.arguments),)


def _dropout(node: Context, grad: Tensor) -> Gradients:
    ones = ones_like(grad)
    return (grad * dropout.masked(ones, node.saved[0], node.p, ones),)


def _cross_entropy(node: Context, grad: Tensor) -> Gradients:
    """The shares less the targets', which the operation's own gradient has, too."""
    shares = F.softmax(node.inputs[0], -1) / node.divisor
    targets = shares.detach() - node.saved[0].detach()
    return ((grad if grad.ndim == 0 else grad.unsqueeze(-1)) * (shares - targets),)


def _max_pool(node: Context, grad: Tensor) -> Gradients:
    """Return each gradient at the place of its window's maximum, which is not a function of x."""
    planes, (height, width) = grad.shape[0] * grad.shape[1], node.window[:2]
    places = node.saved[0].alias((planes, grad.numel() // planes))
    rows = F.reshape(grad, places.shape)
    placed = indexing.ScatterOp.apply(rows, axis=1, index=places, each=True, length=height * width)
    return (F.reshape(placed, node.inputs[0].shape),)


def _embedding(node: Context, grad: Tensor) -> Gradients:
    """Return the gradients added up at their entries, of which the padding's gets none."""
    (table,), indices = node.inputs, node.indices.alias((node.indices.numel(),))
    rows = F.reshape(grad, (indices.numel(), table.shape[1]))
    if node.padding >= 0:
        rows = F.masked_fill(rows, (indices == node.padding).unsqueeze(1), 0.0)
    return (indexing.spread(rows, 0, indices, table.shape[0]),)


def _concat(node: Context, grad: Tensor) -> Gradients:
    parts = F.split(grad, [shape[node.axis] for shape in node.shapes], node.axis)
    own = [F.reshape(part, x.shape) for part, x in zip(parts, node.inputs, strict=True)]
    return tuple([part if needed else None for part, needed in zip(own, node.needs, strict=True)])


def _where(node: Context, grad: Tensor) -> Gradients:
    first, second = node.inputs
    taken = comparisons.MaskedFill.apply(grad, flags=node.flags, where=0, value=0.0)
    left = comparisons.MaskedFill.apply(grad, flags=node.flags, where=1, value=0.0)
    return summed_to(taken, first.shape), summed_to(left, second.shape)


#: By operation, of what it has kept and of shapes; an operation that has no rule has no gradients of gradients.
OF_NODES: dict[type[Op], Rule] = {
    Adjoint: lambda node, g: (node.of.apply(g, **node.arguments),),
    elementwise.Affine: lambda node, g: (g * node.scale,),
    elementwise.DivideBy: lambda node, g: (g / node.number,),
    shape.Reshape: lambda node, g: (F.reshape(g, node.inputs[0].shape),),
    shape.Clone: lambda node, g: (g,),
    blocks.Concat: _concat,
    comparisons.Where: _where,
    dropout.DropoutOp: _dropout,
    indexing.EmbeddingOp: _embedding,
    pool.MaxPool2dOp: _max_pool,
}
#: Those that read the inputs' elements.
OF_INPUTS: dict[type[Op], Rule] = {
    matmul.MatMul: _matmul,
    matmul.LinearOp: _linear,
    batched_matmul.BatchedMatMul: _batched,
    conv2d.Conv2dOp: _conv2d,
    conv2d.ConvTranspose2dOp: _conv_transpose2d,
    loss.CrossEntropy: _cross_entropy,
    softmax.SoftmaxOp: _of_one(_softmax),
    softmax.LogSoftmaxOp: _of_one(lambda g, x: g - F.softmax(x, -1) * F.sum(g, -1, True)),
    softmax.LogSumExp: _of_one(lambda g, x: F.softmax(x, -1) * g.unsqueeze(-1)),
}


def reads_inputs(op: type[Op]) -> bool:
    """Return whether the rule of an operation reads its inputs' elements."""
    return not op.is_step() if issubclass(op, Elements) else not op.is_linear and op not in OF_NODES
