"""Judges gradients: whether ranks step with the mean of their own ones, by samples where batches differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clcomm.base.console.finding import Finding, note, ok
from clcomm.tools.verify.job import JobRecord
from clcomm.tools.verify.record import BACKWARD, STEP, SYNC, Sketches, Step
from clcomm.tools.verify.watcher import by_rank, wrong

#: Up to which relative distance gradients are the same sum in another order, and the same but for compression.
SAME, NEAR = 1e-5, 0.02


class _Gradients:
    """One step's gradients of all ranks, those of their own and those that their optimizers see."""

    def __init__(self, job: JobRecord, steps: Sequence[Step]):
        self.job, self.steps = job, steps
        names = {name for step in steps for name in step.local if step.local[name].any()}
        self.local = {name: _of_ranks([step.local for step in steps], name) for name in job.ordered(names)}
        self.is_clipped = all(step.clipped for step in steps)
        clipped = [step.clipped for step in steps]
        self.stepped = {name: _of_ranks([step.seen for step in steps], name) for name in self.local}
        #: The names whose gradients differ between ranks as they are clipped.
        self.clipped_apart = [
            name for name in self.local if self.is_clipped and _spread(_of_ranks(clipped, name)) > SAME
        ]
        is_early = self.clipped_apart and not self.apart(self.stepped)
        # What clipping does to a synchronised gradient is no concern.
        use = self.is_clipped and not is_early
        self.seen = {name: _of_ranks(clipped, name) for name in self.local} if use else self.stepped
        self.is_clipped_early = bool(is_early)

    def apart(self, gradients: Mapping[str, list[np.ndarray]]) -> list[str]:
        """Return the names whose own gradients differ between ranks, and these too."""
        return [name for name in self.differing if _spread(gradients[name]) > SAME]

    @property
    def differing(self) -> list[str]:
        return [name for name, own in self.local.items() if _spread(own) > SAME]

    def is_own(self, name: str) -> bool:
        """Return whether each rank steps with its own gradient of a parameter, clipped or not."""
        pairs = zip(self.stepped[name], self.local[name], strict=True)
        return all(_coefficient(seen, own)[1] < NEAR for seen, own in pairs)

    def fit(self) -> _Fit:
        """Compare what is seen with the mean of the ranks' own gradients, and with their mean by samples."""
        ranks = range(len(self.steps))
        seen = np.concatenate([self.seen[name][0] for name in self.local])
        own = np.stack([np.concatenate([self.local[name][rank] for name in self.local]) for rank in ranks], 1)
        samples = np.array([step.samples for step in self.steps], float)
        by_samples = own @ (samples / samples.sum()) if samples.any() else own.mean(1)
        weights = np.linalg.lstsq(own, seen, rcond=None)[0]
        coefficient, distance = _coefficient(seen, own.mean(1))
        weighted, distance_by_samples = _coefficient(seen, by_samples)
        return _Fit(
            coefficient * self._factor, distance, weighted * self._factor, distance_by_samples,
            uneven=_distance(by_samples, own.mean(1)) if samples.all() else 0.0, weights=weights,
            shares=weights * np.linalg.norm(own, axis=0), misfit=_distance(own @ weights, seen),
        )  # fmt: skip

    @property
    def _factor(self) -> float:
        """By what the program has multiplied the mean of a step's micro-batches, as far as it is known."""
        passes = max(1, self.steps[0].events.count(BACKWARD))
        total = passes * self.steps[0].factor
        return 1 / len(self.steps) if abs(total * len(self.steps) - 1) < SAME else 1.0


class _Fit(NamedTuple):
    """How what all ranks step with depends on their own gradients.

    coefficient, distance: of the multiple of their mean that is nearest to it, and how far that is from it.
    by_samples, distance_by_samples: the same of their mean by samples.
    uneven: the distance between the two means; 0 where samples are not known.
    weights, misfit: of the sum of their own that is nearest to it, and the distance of that.
    shares: each rank's part of that sum, as a norm.
    """

    coefficient: float
    distance: float
    by_samples: float
    distance_by_samples: float
    uneven: float
    weights: np.ndarray
    shares: np.ndarray
    misfit: float

    @property
    def is_mean(self) -> bool:
        """Whether it is a multiple of one of the means."""
        return min(self.distance, self.distance_by_samples) <= NEAR

    @property
    def scale(self) -> float:
        """The multiple of the nearer mean."""
        return self.by_samples if self.distance_by_samples < self.distance else self.coefficient

    @property
    def ignores_samples(self) -> bool:
        """Whether it is the plain mean although batches are unequal."""
        is_nearer = self.distance < min(NEAR, self.distance_by_samples)
        return self.uneven > NEAR / 2 and is_nearer and abs(self.coefficient - 1) < NEAR

    @property
    def has_equal_shares(self) -> bool:
        """Whether each rank's part is as long as the others', as after each has clipped its own."""
        return bool(min(self.shares) > 0 and max(self.shares) < (1 + NEAR) * min(self.shares))


def _of_ranks(gradients: Sequence[Sketches], name: str) -> list[np.ndarray]:
    empty = next((own[name] for own in gradients if name in own), np.zeros(1)) * 0.0
    return [own.get(name, empty) for own in gradients]


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    scale = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return float(np.linalg.norm(one - other)) / scale if scale else 0.0


def _spread(values: Sequence[np.ndarray]) -> float:
    return max(_distance(values[0], each) for each in values)


def _coefficient(values: np.ndarray, of: np.ndarray) -> tuple[float, float]:
    """Return the number c for which values are nearest to c times another vector, and their distance then."""
    square = float(of @ of)
    c = float(values @ of) / square if square else 0.0
    return c, _distance(values, c * of)


def judge_gradients(job: JobRecord) -> Iterator[Finding]:
    """Yield the finding about gradients: are they the mean of the ranks' own at every step, and why not?"""
    if any(rank.hides_gradients for rank in job.ranks):
        yield ok("gradients", "reduced within the step; the parameters show whether they are right")
        return
    found = [(number, _Gradients(job, steps)) for number, steps in job.steps() if any(step.local for step in steps)]
    for number, each in found:
        finding = _carried(job, number, each) or _unsynchronised(job, number, each, [step for _, step in found])
        if finding is not None:
            yield finding
            return
    yield _scaled(job, [pair for pair in found if pair[1].local])


def _carried(job: JobRecord, number: int, step: _Gradients) -> Finding | None:
    names = job.ordered({name for each in step.steps for name in each.carried})
    if not names:
        return None
    first = names[0]
    return wrong("zero-grad", f"step {number} adds to the gradient of the step before, first in {first}", first)


def _unsynchronised(job: JobRecord, number: int, step: _Gradients, others: Sequence[_Gradients]) -> Finding | None:
    if step.is_clipped_early:
        return _clipped_early(number, step.clipped_apart[0])
    apart = step.apart(step.stepped)
    if not apart:
        return None
    own = [name for name in apart if step.is_own(name)]
    name = (own or apart)[0]
    if any(rank.averages_parameters for rank in job.ranks):
        return note(
            "gradients", "each rank steps with its own, and parameters are exchanged: local SGD, or a policy", ""
        )
    if not own:
        return wrong("apart", f"{name} differs between ranks at step {number}, and is no rank's own gradient", name)
    trained = {name for other in others for name in other.differing}
    if len(apart) < len(trained) and any(set(other.differing) - set(other.apart(other.stepped)) for other in others):
        missing = f"leaves out {len(apart)} of {len(trained)} gradients in the synchronisation"
        return wrong("left-out", f"step {number} {missing}, first {name}", name)
    if any(SYNC in each.events[each.events.index(STEP) :] for each in step.steps if STEP in each.events):
        return wrong("late-sync", f"step {number} steps before the gradients are synchronised, first {name}", name)
    steps = f"step {number} steps with each rank's own gradients"
    return wrong("no-sync", f"{steps}, first {name}: nothing averages them", name)


def _clipped_early(number: int, name: str) -> Finding:
    clips = f"step {number} clips before the synchronisation"
    return wrong("clip", f"{clips}, first {name}: each rank by its own norm", name)


def _scaled(job: JobRecord, found: Sequence[tuple[int, _Gradients]]) -> Finding:
    """Judge gradients that are the same on all ranks: are they the mean of the ranks' own?"""
    if not found:
        return note("gradients", "no gradient was seen", "")
    size, name, fits = job.size, next(iter(found[0][1].local)), [step.fit() for _, step in found]
    for (number, step), fit in zip(found, fits, strict=True):
        finding = _weighed(number, step, fit, name)
        if finding is not None:
            return finding
    multiples = {"sum": (size, f"the sum over {size} ranks, {size} times the mean"),
                 "divided-twice": (1 / size, f"divided by {size} twice, 1/{size} of the mean")}  # fmt: skip
    for cause, (factor, what) in multiples.items():
        if all(abs(fit.scale / factor - 1) < NEAR for fit in fits):
            return wrong(cause, f"they are {what}, first {name}", name)
    if not all(fit.is_mean for fit in fits):
        return note("gradients", "the same on all ranks, but not exactly their mean, as with lossy compression", "")
    return ok("gradients", f"the mean over {size} ranks at every step")


def _weighed(number: int, step: _Gradients, fit: _Fit, name: str) -> Finding | None:
    """Return the finding about a step that weighs the ranks' gradients otherwise than by their samples."""
    if fit.ignores_samples:
        sizes = by_rank((rank, each.samples) for rank, each in enumerate(step.steps))
        return wrong("unequal-batches", f"step {number} averages unequal batches without weights: {sizes}", name)
    if fit.is_mean or fit.misfit >= NEAR:
        return None
    if fit.has_equal_shares:
        return _clipped_early(number, name)
    listed = ", ".join(f"{weight:.3g} times rank {rank}'s" for rank, weight in enumerate(fit.weights))
    return wrong("weights", f"step {number} weighs the ranks' gradients unequally, {name}: {listed}", name)
