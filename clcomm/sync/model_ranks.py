"""The ranks that together have one replica of a model, and what is true of all their parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import ArgumentError

if TYPE_CHECKING:
    from clcomm.engine.parameter import Parameter, ParameterPart, Stages
    from clcomm.sync.shared_space import SharedSpace

_CHUNK = 1 << 14  # elements that stay in the cache as float64


class ModelRanks:
    """The ranks that together have one replica of a model: those with parts of its parameters, and with its stages.

    Where this rank has the whole model there are no others, and nothing is communicated.

    Args:
        parameters: this rank's, by name; of another library's model none are needed.
    """

    def __init__(self, parameters: Mapping[str, Parameter]):
        self._parameters = parameters
        members = parameters.values()
        self.part: ParameterPart | None = next((each.part for each in members if each.part is not None), None)
        self.stages: Stages | None = next((each.stages for each in members if each.stages is not None), None)

    @classmethod
    def of(cls, space: SharedSpace) -> ModelRanks:
        """Return those of the model in a flat space."""
        flat = space.flat_space
        if flat is None:
            return cls({})
        return cls({place.name: each for place, each in zip(flat.layout.ranges, flat.parameters, strict=True)})

    def own_squares(self, parts: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
        """Return the sums of the squares of gradients by parameters' names: of whole parameters, and of divided ones.

        What counts on another stage's rank is left out.
        """
        squares: tuple[list[float], list[float]] = [], []
        for name, values in parts:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.stages is None or parameter.stages.counts(parameter):
                squares[parameter is not None and parameter.part is not None].append(sum_of_squares(values))
        return np.array([math.fsum(each) for each in squares])

    def norm(self, squares: Sequence[float]) -> float:
        """Return the norm of all ranks' gradients; squares: as `own_squares` returns them. Collective."""
        whole, divided = squares
        if self.part is not None:
            everyone = self.part.gather_numbers(np.array([whole, divided]))
            whole, divided = everyone[0, 0], math.fsum(everyone[:, 1])
        total = math.fsum([whole, divided])
        if self.stages is not None:
            total = math.fsum(self.stages.gather_numbers(np.array([total]))[:, 0])
        return math.sqrt(total)

    def anywhere(self, here: bool) -> bool:
        """Return whether something is true on any of the ranks; collective."""
        for ranks in (self.part, self.stages):
            if ranks is not None:
                here = bool(ranks.gather_numbers(np.array([here])).any())
        return here


def mixes_ranks(space: SharedSpace) -> bool:
    """Return whether backward adds up gradients of several ranks, in any stage; collective over the stages."""
    return ModelRanks.of(space).anywhere(bool(space.mixing_layers()))


def refuse_mixing(space: SharedSpace, call: str, reason: str) -> None:
    """Raise ArgumentError where backward adds up gradients of several ranks; collective over the stages."""
    if mixes_ranks(space):
        raise ArgumentError(f"{call}: expected a model without SyncBatchNorm, {reason}, got one with it")


def is_divided(space: SharedSpace) -> bool:
    """Return whether tensor-parallel ranks divide a model, in any stage; collective over the stages."""
    ranks = ModelRanks.of(space)
    return ranks.anywhere(ranks.part is not None and ranks.part.ranks > 1)


def sum_of_squares(part: np.ndarray) -> float:
    """Return the sum of an array's squares, computed in float64."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, part.size, _CHUNK):
            chunk = part[begin : begin + _CHUNK].astype(np.float64)
            chunk *= chunk  # not a dot product: BLAS threads would compete with the other ranks for their cores
            total += float(chunk.sum())
    return total
