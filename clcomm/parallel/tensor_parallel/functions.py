"""Differentiable exchanges between tensor-parallel ranks, with their forward and backward communication.

Tensors that are the same on all ranks have gradients that are the same on all ranks; a tensor that ranks use in
different ways, or of which each has a part, has a gradient of its own on each. Source: Shoeybi et al., "Megatron-LM",
2019 (copy, reduce), and Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
(gather, reduce-scatter), whose names these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.shape import copy_part
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor, constant, empty, float_tensor
from clcomm.engine.view import Block, is_recording, surrounded
from clcomm.parallel.exchange import ACTIVATIONS, INPUT_GRADIENTS, PARAMETER_GRADIENTS, Exchange


class CopyToRanks(Op):
    """x, the same on all ranks; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange) -> Tensor:
        ctx.ranks = ranks
        return x.alias(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ranks.size == 1:
            return (grad,)
        return (ctx.ranks.summed(grad, INPUT_GRADIENTS, partial(ctx.out, 0)),)


class ReduceFromRanks(Op):
    """The sum of the ranks' x; its gradient is each rank's."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange) -> Tensor:
        return x.alias(x.shape) if ranks.size == 1 else ranks.summed(x, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad,)


class ScatterToRanks(Op):
    """Each rank's part of x, which is the same on all ranks; backward gathers the parts' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        part = empty(x.device, (*x.shape[:axis], x.shape[axis] // ranks.size, *x.shape[axis + 1 :]))
        return ranks.own_part(x, axis, part)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.ranks.gather(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)


class GatherFromRanks(Op):
    """All ranks' parts; backward takes this rank's part, of the ranks' sum with `sums`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int, sums: bool) -> Tensor:
        ctx.ranks, ctx.axis, ctx.sums = ranks, axis, sums
        return ranks.gather(x, axis, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums:
            return (ctx.ranks.summed_part(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)
        return (ctx.ranks.own_part(grad, ctx.axis, ctx.out(0)),)


class ReduceScatterToRanks(Op):
    """Each rank's part of the sum of the ranks' x; backward gathers the parts' gradients."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, ranks: Exchange, axis: int) -> Tensor:
        ctx.ranks, ctx.axis = ranks, axis
        return ranks.summed_part(x, axis, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.ranks.gather(grad, ctx.axis, INPUT_GRADIENTS, partial(ctx.out, 0)),)


def copy_to_ranks(x: Tensor, ranks: Exchange) -> Tensor:
    """Return x, which is the same on all ranks and which each uses in its own way; backward sums their gradients."""
    return CopyToRanks.apply(float_tensor("copy_to_ranks", x), ranks=ranks)


def reduce_from_ranks(x: Tensor, ranks: Exchange) -> Tensor:
    """Return the sum of all ranks' x, in rank order, which all use alike; backward passes the gradient on."""
    return ReduceFromRanks.apply(float_tensor("reduce_from_ranks", x), ranks=ranks)


def scatter_to_ranks(x: Tensor, ranks: Exchange, axis: int = -1) -> Tensor:
    """Return this rank's part of x, which is the same on all ranks, along `axis`; backward gathers the gradients.

    Raises ArgumentError for a dimension that x does not have, or that the ranks do not divide.
    """
    return ScatterToRanks.apply(x, ranks=ranks, axis=_divided("scatter_to_ranks", x, ranks, axis))


def gather_from_ranks(x: Tensor, ranks: Exchange, axis: int = -1, *, sums: bool = False) -> Tensor:
    """Return all ranks' x one after the other along `axis`; backward gives each rank the gradient of its part.

    Args:
        sums: whether the ranks use the result in different ways, so that backward sums their gradients.

    Raises ArgumentError for a dimension that x does not have.
    """
    at = _dimension("gather_from_ranks", x, axis)
    return GatherFromRanks.apply(x, ranks=ranks, axis=at, sums=bool(sums))


def reduce_scatter_to_ranks(x: Tensor, ranks: Exchange, axis: int = -1) -> Tensor:
    """Return this rank's part, along `axis`, of the sum of all ranks' x in rank order; backward gathers the gradients.

    Raises ArgumentError for a dimension that x does not have, or that the ranks do not divide.
    """
    return ReduceScatterToRanks.apply(x, ranks=ranks, axis=_divided("reduce_scatter_to_ranks", x, ranks, axis))


def _dimension(name: str, x: Tensor, axis: int) -> int:
    if not -float_tensor(name, x).ndim <= axis < x.ndim:
        raise ArgumentError(f"{name}: axis {axis} does not fit a tensor of shape {x.shape}")
    return axis % x.ndim


def _divided(name: str, x: Tensor, ranks: Exchange, axis: int) -> int:
    at = _dimension(name, x, axis)
    if x.shape[at] % ranks.size:
        raise ArgumentError(
            f"{name}: expected a dimension {at} that {ranks.size} ranks divide, got {x.shape[at]} in shape {x.shape}"
        )
    return at


# --- Modules that compute with a rank's part of the sequence, and the summed gradients of whole parameters in them. ---
# A rank's own gradient of such a parameter is that of its tokens. The sums over the ranks are made within backward,
# in
# one all-reduce for all parameters of a module, before a data-parallel synchronisation can see them.
# Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.

#: An attribute that holds a parameter: the module, and the name.
Place = tuple[Module, str]


class SequenceForward:
    """The `forward` of a module on a part of the sequence, with the gradients of whole parameters in it summed.

    Args:
        ranks: divide the sequence along `axis`.
        splits: whether the input is whole, of which each rank takes its part.
        gathers: whether the result is gathered.
    """

    def __init__(self, module: Module, ranks: Exchange, axis: int, splits: bool, gathers: bool):
        self._module, self._ranks, self._axis = module, ranks, axis
        self._splits, self._gathers = splits, gathers

    def __call__(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self._splits:
            x = scatter_to_ranks(x, self._ranks, self._axis)
        with shared_gradients(whole_parameters(self._module), self._ranks):
            y = type(self._module).forward(self._module, x, *args, **kwargs)
        return gather_from_ranks(y, self._ranks, self._axis) if self._gathers else y


def whole_parameters(module: Module) -> list[Place]:
    """Return the attributes in a module and inside it that hold whole parameters."""
    return [
        (each, name)
        for _, each in module.named_modules()
        for name, parameter in each._parameters.items()
        if parameter.part is None
    ]


class _Group(Op):
    """The parameters of a module, as one node of the tape: it comes last in backward, and sums all their gradients."""

    @staticmethod
    def forward(ctx: Context, *parameters: Tensor, ranks: Exchange, own: dict[int, Tensor]) -> Tensor:
        ctx.ranks, ctx.own = ranks, own
        return constant(ranks.device, 0.0)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        parameters, own = ctx.inputs, ctx.own
        starts = [sum(each.numel() for each in parameters[:number]) for number in range(len(parameters) + 1)]
        pending = ctx.ranks.sum((starts[-1],), PARAMETER_GRADIENTS)
        if len(own) < len(parameters):  # some are not used: zeros, as other ranks may use them
            device, summands = ctx.ranks.device, pending.own
            device.launch(device.kernel("elementwise", "fill"), *device.grid(starts[-1]), summands.buffer, 0.0,
                          starts[-1])  # fmt: skip
        for number, gradient in own.items():
            size = (gradient.numel(),)
            copy_part(size, pending.own, Block(starts[number], (1,)), gradient, Block(0, (1,)))
        own.clear()
        total = pending.total()
        gradients: list[Tensor | None] = []
        for number, parameter in enumerate(parameters):
            out = ctx.out(number) if ctx.needs[number] else None
            if out is not None:
                copy_part((parameter.numel(),), out, Block(0, (1,)), total, Block(starts[number], (1,)))
            gradients.append(out)
        return tuple(gradients)


class _Member(Op):
    """One parameter of a `_Group`."""

    @staticmethod
    def forward(ctx: Context, group: Tensor, *, parameter: Tensor, number: int, own: dict[int, Tensor]) -> Tensor:
        ctx.number, ctx.own = number, own
        return parameter.alias(parameter.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        is_first = not ctx.own
        ctx.own[ctx.number] = grad
        return (constant(grad.device, 0.0) if is_first else None,)


@contextmanager
def shared_gradients(places: Sequence[Place], ranks: Exchange) -> Iterator[None]:
    """Sum these parameters' gradients from the operations in the block over the ranks, in backward.

    Within the block the attributes hold tensors in place of the parameters; an outer block's stay.
    """
    held = [(module, name, getattr(module, name)) for module, name in places]
    used = [each for each in held if isinstance(each[2], Parameter) and each[2].requires_grad]
    if not used or ranks.size == 1 or not is_recording():
        yield
        return
    own: dict[int, Tensor] = {}
    group = _Group.apply(*(parameter for *_, parameter in used), ranks=ranks, own=own)
    members = [
        (module, name, _Member.apply(group, parameter=parameter, number=number, own=own))
        for number, (module, name, parameter) in enumerate(used)
    ]
    with surrounded((lambda: _held(members),)):
        yield


@contextmanager
def _held(values: Sequence[tuple[Module, str, Tensor]]) -> Iterator[None]:
    """Within it attributes hold these tensors."""
    before = [(module, name, getattr(module, name)) for module, name, _ in values]
    for module, name, value in values:
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            object.__setattr__(module, name, value)
