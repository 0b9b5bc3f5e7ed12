"""The ranks that together have one replica of a model, and what is true of all their parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.parameters import MISSING
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS
from clcomm.sync.shared_space import SharedSpace

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


# --- What the Synchronizer asks of an optimizer that reduces a model's gradients itself. ---


class ShardedUpdate(Protocol):
    """What reduces a model's gradients in its own step, in place of `sync_gradients`: see DistributedOptimizer."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What it reduces at a time."""

    def shard(self, space: SharedSpace) -> None:
        """Divide a model's memory between the ranks, after all have the same parameters; collective, once a model."""

    def expect_step(self, weight: float) -> None:
        """Note that the gradients are complete, and count `weight` times in the mean."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Average the gradients, clip them and return their norm before; collective."""

    def require_same_settings(self) -> None:
        """Raise MismatchError on every rank where the ranks' settings differ; collective."""


# --- Ranks with uneven inputs: the weight of each rank's gradient, and how many ranks still have batches. ---


class InputTotals(NamedTuple):
    """How many ranks still have inputs at this step, and how many samples they bring."""

    ranks: int
    samples: float


def total_inputs(comm: Communicator, samples: float | None) -> InputTotals:
    """Return this step's totals, the same on every rank; samples: this rank's, None: it has no more. Collective."""
    mine = np.array([0, 0] if samples is None else [1, samples], np.float64)
    ranks, total = comm.all_reduce(mine, label=CHECKS)
    return InputTotals(int(ranks), float(total))


def check_samples(samples: float, of: float | None = None) -> None:
    """Raise ArgumentError unless both are numbers from 0 up, and `of` is above 0 where there are samples."""
    for name, value, what in ("samples", samples, "this rank's number"), ("of", of or 0, "all ranks' number"):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
            raise ArgumentError(f"{name}: expected {what} of samples, from 0 up, got {value!r}")
    if of == 0 and samples:
        raise ArgumentError(f"of: expected a number above 0 to divide by, as there are {samples} samples, got {of!r}")


def require_equal_samples(comm: Communicator, samples: float) -> None:
    """Raise ArgumentError on every rank where backward has mixed gradients that should have had weights. Collective."""
    check_samples(samples)
    everyone = comm.all_gather(np.array([float(samples)]), label=CHECKS)[:, 0]
    if (everyone != everyone[0]).any():
        raise ArgumentError(
            f"samples: expected them before backward, by expect_samples(), as SyncBatchNorm's backward adds up the "
            f"ranks' gradients, got {_listed(everyone)} after it"
        )


def mixing_weight(comm: Communicator, samples: float, of: float | None) -> float:
    """Return the factor for this rank's gradient as `gradient_weight`, for layers that divide by it. Collective."""
    check_samples(samples, of)
    everyone = comm.all_gather(np.array([float(samples)]), label=CHECKS)[:, 0]
    if not everyone.all():
        raise ArgumentError(
            "samples: expected some on every rank with SyncBatchNorm, whose statistics are of all ranks' batches, got "
            f"{_listed(everyone)}"
        )
    return weight_of(samples, comm.size, float(everyone.sum()) if of is None else of)


def _listed(samples: np.ndarray) -> str:
    return f"{', '.join(f'{each:g}' for each in samples)} on ranks 0 to {len(samples) - 1}"


def gradient_weight(comm: Communicator, samples: float, of: float | None = None, *, in_join: bool = False) -> float:
    """Return the factor for this rank's gradient that makes the mean over ranks the mean over samples.

    Collective, unless `of` is given outside of a join, where ranks without inputs have to be told of each step.

    1.0, and so the same bits as without, where all ranks have equally many. Raises ArgumentError unless `samples` is a
    number from 0 up.

    Args:
        samples: this rank's.
        of: the number of samples to divide by; None: that of all ranks.
    """
    check_samples(samples, of)
    found = total_inputs(comm, float(samples)).samples if of is None or in_join else 0.0
    return weight_of(samples, comm.size, found if of is None else of)


def weight_of(samples: float, count: int, total: float) -> float:
    """Return the factor of a gradient over `samples` that makes the mean of `count` gradients that over all samples."""
    return float(samples) * count / total if total else 0.0


def apply_weight(gradients: np.ndarray, weight: float) -> None:
    """Multiply gradients by a weight, in place; with 0 they are missing, NaN and Inf included."""
    if weight == 0.0:
        gradients[...] = MISSING
    elif weight != 1.0:
        gradients *= gradients.dtype.type(weight)
