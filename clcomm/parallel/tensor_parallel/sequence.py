"""Modules that compute with a rank's part of the sequence.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.
"""

from __future__ import annotations

from clcomm.engine.nn.module import Module
from clcomm.engine.tensor import Tensor
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.tensor_parallel.functions import gather_from_ranks, scatter_to_ranks
from clcomm.parallel.tensor_parallel.gradients import Place, shared_gradients


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
