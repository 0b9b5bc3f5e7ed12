"""What operations of several steps compute, made of operations whose gradients have gradients."""

from __future__ import annotations

from collections.abc import Callable

from clcomm.engine import functional as F
from clcomm.engine.autograd import Context, Op
from clcomm.engine.creation import zeros
from clcomm.engine.fusion.function import FusedOp
from clcomm.engine.ops import batch_norm, conv2d, loss, norms, recurrent
from clcomm.engine.tensor import Tensor


def _normalised(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centred = x - F.mean(x, axes, True)
    return centred * F.rsqrt(F.mean(F.square(centred), axes, True) + eps)


def _layer_norm(node: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rows = F.reshape(x, (-1, node.columns))
    y = _normalised(rows, (1,), node.eps)
    y = y if weight is None else y * F.reshape(weight, (node.columns,))
    return F.reshape(y if bias is None else y + F.reshape(bias, (node.columns,)), x.shape)


def _batch_norm(node: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    each = (1, x.shape[1]) + (1,) * (x.ndim - 2)
    if node.statistics == batch_norm.GIVEN:
        mean, variance = node.running.mean, node.running.variance
        y = (x - F.reshape(mean, each)) * F.rsqrt(F.reshape(variance, each) + node.eps)
    else:
        y = _normalised(x, (0, *range(2, x.ndim)), node.eps)
    y = y if weight is None else y * F.reshape(weight, each)
    return y if bias is None else y + F.reshape(bias, each)


def _group_norm(node: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = F.reshape(_normalised(F.reshape(x, (x.shape[0] * node.groups, -1)), (1,), node.eps), x.shape)
    each = (1, x.shape[1]) + (1,) * (x.ndim - 2)
    y = y * F.reshape(weight, each)
    return y if bias is None else y + F.reshape(bias, each)


def _squared_error(node: Context, prediction: Tensor, target: Tensor) -> Tensor:
    found = F.square(prediction - target)
    return found if node.g_step else F.sum(found) / node.divisor


def _smooth_l1(node: Context, prediction: Tensor, target: Tensor) -> Tensor:
    beta, factor = node.settings
    size = F.abs(prediction - target)
    losses = size
    if beta:
        losses = F.where(size.detach() < beta, F.square(size) * (0.5 / beta), size - 0.5 * beta)
    return _reduced(node, losses * factor)


def _logits_binary_cross_entropy(node: Context, logits: Tensor, target: Tensor) -> Tensor:
    weight, positive, has_weight, has_positive = node.settings
    share = (positive - 1.0) * target + 1.0 if has_positive else 1.0
    losses = (1.0 - target) * logits - F.logsigmoid(logits) * share
    return _reduced(node, losses * weight if has_weight else losses)


def _reduced(node: Context, losses: Tensor) -> Tensor:
    return F.sum(losses) / node.divisor if node.is_reduced else losses


def _conv_relu_pool(node: Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.max_pool2d(F.relu(conv2d.Conv2dOp.apply(x, weight, bias, geometry=node.geometry)), 2)


def _recurrent(
    node: Context, gates: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, c: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return what `RecurrentOp` does, cell by cell; rows that are ended keep their states."""
    steps, results = gates.shape[0], {}
    begun = zeros((gates.shape[1], weight.shape[1]), device=gates.device)
    states = [begun if each is None else each for each in (h, c)[: node.cell.states]]
    for number in reversed(range(steps)) if node.reverse else range(steps):
        after = _step(node.cell, gates[number], F.linear(states[0], weight, bias), states)
        results[number] = after[0]
        if lengths is not None:
            is_ended = (lengths <= number).unsqueeze(1)
            results[number] = F.masked_fill(after[0], is_ended, 0.0)
            after = [F.where(is_ended, old, new) for old, new in zip(states, after, strict=True)]
        states = after
    return F.stack([*[results[number] for number in range(steps)], *states])


def _step(cell: recurrent.Cell, gates: Tensor, hidden: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Return the states after a step, of the gates' parts of x and of h [N, gates * H]."""
    if cell.gates == 1:
        activation = F.relu if cell is recurrent.CELLS["relu"] else F.tanh
        return [activation(gates + hidden)]
    if cell is recurrent.CELLS["lstm"]:
        into, forget, new, out = F.chunk(gates + hidden, 4, 1)
        c = F.sigmoid(forget) * states[1] + F.sigmoid(into) * F.tanh(new)
        return [F.sigmoid(out) * F.tanh(c), c]
    (*both, of_x), (*own, of_h) = F.chunk(gates, 3, 1), F.chunk(hidden, 3, 1)
    reset, update = [F.sigmoid(a + b) for a, b in zip(both, own, strict=True)]
    return [(1.0 - update) * F.tanh(of_x + reset * of_h) + update * states[0]]


#: By operation, of its node and its inputs.
FORMS: dict[type[Op], Callable[..., Tensor]] = {
    FusedOp: lambda node, *inputs: node.plan.call(inputs),
    norms.LayerNormOp: _layer_norm,
    batch_norm.BatchNormOp: _batch_norm,
    norms.GroupNormOp: _group_norm,
    conv2d.ConvReluPoolOp: _conv_relu_pool,
    recurrent.RecurrentOp: _recurrent,
    loss.SquaredError: _squared_error,
    loss.SmoothL1: _smooth_l1,
    loss.LogitsBinaryCrossEntropy: _logits_binary_cross_entropy,
}
