"""Modules that compute with a rank's part of the sequence, and the summed gradients of whole parameters in them.

A rank's own gradient of such a parameter is that of its tokens. The sums over the ranks are made within backward, in
one all-reduce for all parameters of a module, before a data-parallel synchronisation can see them.
Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clcomm.engine.autograd import Context, Op
from clcomm.engine.modes import is_recording, surrounded
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.shape import copy_part, fill
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor, constant
from clcomm.engine.view import Block
from clcomm.parallel.exchange import PARAMETER_GRADIENTS, Exchange
from clcomm.parallel.tensor_parallel.functions import gather_from_ranks, scatter_to_ranks

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
            fill(pending.own, 0.0)
        for number, gradient in own.items():
            size = (gradient.numel(),)
            copy_part(size, pending.own, Block(starts[number], (1,)), gradient, Block(0, (1,)))
        own.clear()
        total = pending.total()
        gradients = [ctx.out(number) for number in range(len(parameters))]
        for start, out in zip(starts, gradients, strict=False):
            copy_part((out.numel(),), out, Block(0, (1,)), total, Block(start, (1,)))
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
