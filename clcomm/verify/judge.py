"""Judges the ranks' records: whether they train as one process would with the whole batch, and why not.

Works on records alone. A gradient is right where it is the mean of the ranks' own ones, by samples where batches
differ; so nothing has to be computed again by one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from clcomm.console.finding import PROBLEM, Finding, note, ok, problem
from clcomm.errors import name_ranks
from clcomm.verify.record import BACKWARD, FORWARD, STEP, SYNC, RankRecord, Sketches, Step

#: Up to which relative distance gradients are the same sum in another order, and the same but for compression.
SAME, NEAR = 1e-5, 0.02
#: The share of samples that several ranks read above which their shards overlap: samplers repeat a few to fill up.
OVERLAP = 0.02
_CLASSES_OF_CLCOMM = ("MismatchError", "DivergenceError")
#: By cause: the question that it answers, and what to do.
_SYNCHRONISE = "synchronise them between backward and the optimizer's step"
CAUSES = {
    "model": ("model", "build the same model on every rank"),
    "start": ("start", "call broadcast_parameters, wrap the model in DistributedDataParallel, or seed all ranks alike"),
    "options": ("optimizer", "give every rank the same options and schedule"),
    "state": ("optimizer", "load the checkpoint on every rank, or broadcast the state after loading it"),
    "same-data": ("data", "give each rank its shard, as a DistributedSampler does"),
    "overlap": ("data", "shuffle with the same seed on every rank, and take each rank's part of that order"),
    "skipped-step": ("course", "let all ranks take a step or none"),
    "unused": (
        "course",
        "use every parameter on every rank, or find_unused_parameters=True in DistributedDataParallel",
    ),
    "zero-grad": ("gradients", "call zero_grad() once between steps"),
    "clip": ("gradients", "synchronise, then clip"),
    "apart": ("gradients", "change gradients alike on every rank after the synchronisation"),
    "left-out": ("gradients", "synchronise every parameter that the optimizer steps"),
    "late-sync": ("gradients", _SYNCHRONISE),
    "no-sync": ("gradients", _SYNCHRONISE),
    "unequal-batches": ("gradients", "give every rank as many samples, or weigh: sync_gradients(model, samples=...)"),
    "weights": ("gradients", "weigh ranks by their samples"),
    "sum": ("gradients", "divide by the number of ranks once"),
    "divided-twice": ("gradients", "divide by the number of ranks once"),
    "replicas": ("parameters", "see that every rank changes them alike"),
    "mismatch": ("end", "see the message"),
    "hang": ("end", "let all ranks call the same collectives"),
}


def _wrong(cause: str, what: str, first: str = "") -> Finding:
    """Return the finding of a mistake; first: the first parameter with it."""
    check, remedy = CAUSES[cause]
    return problem(check, what, remedy, cause=cause, first=first)


def _by_rank(values: Iterable[tuple[int, object]]) -> str:
    return ", ".join(f"{value} on rank {rank}" for rank, value in values)


class JobRecord:
    """All ranks' records."""

    def __init__(self, ranks: Sequence[RankRecord], is_stuck: bool = False):
        self.ranks = ranks
        #: Whether some rank waited longer than the limit.
        self.is_stuck = is_stuck and not any(rank.joins for rank in ranks)
        self.counts = [len(rank.complete) for rank in ranks]
        self.sizes = dict(pair for rank in ranks for pair in rank.sizes.items())
        self.names = [*self.sizes]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether the ranks did not come to a common end."""
        is_short = len(set(self.counts)) > 1 and not any(rank.joins for rank in self.ranks)
        return self.is_stuck or is_short or any(rank.error for rank in self.ranks)

    def steps(self) -> Iterator[tuple[int, list[Step]]]:
        """Yield (number from 1 up, the ranks' steps) as far as all ranks completed them."""
        for index in range(min(self.counts)):
            yield index + 1, [rank.complete[index] for rank in self.ranks]

    def ordered(self, names: set[str]) -> list[str]:
        return sorted(names, key=lambda name: self.names.index(name) if name in self.sizes else len(self.names))

    def differing(self, hashes: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the names whose hashes differ between ranks, in the model's order."""
        return self.ordered({name for own in hashes for name in own if len({each.get(name) for each in hashes}) > 1})


def refusal(job: JobRecord) -> str:
    """Return why the records cannot be judged, in one line; "" if they can."""
    given = next((rank.refusal for rank in job.ranks if rank.refusal), "")
    if given:
        return given
    failed = next((rank for rank in job.ranks if rank.error and not _is_of_clcomm(rank)), None)
    if failed is not None:
        return f"the script ended with {failed.error} on rank {failed.rank}"
    if not any(rank.steps for rank in job.ranks):
        return "no optimizer step was seen; it knows those of torch.optim and clcomm.optim" + " in time" * job.is_stuck
    return "" if min(job.counts) else "no step was completed by all ranks"


def _is_of_clcomm(rank: RankRecord) -> bool:
    return rank.error.startswith(_CLASSES_OF_CLCOMM)


def judge(job: JobRecord) -> list[Finding]:
    """Return a finding for each question, PROBLEM where the answer is wrong and follows from no earlier one."""
    found: list[Finding] = []
    for check, causes in _CHECKS:
        is_wrong = {each.check for each in found if each.level == PROBLEM}
        found += (each for each in check(job) if each.level != PROBLEM or is_wrong.isdisjoint(causes))
    return found


# --- start, state, options ---


def _start(job: JobRecord) -> Iterator[Finding]:
    starts = [rank.start for rank in job.ranks if rank.start]
    shapes = [rank.sizes for rank in job.ranks if rank.sizes]
    if len({tuple(each.items()) for each in shapes}) > 1:
        name = job.ordered({name for own in shapes for name in own if len({each.get(name) for each in shapes}) > 1})[0]
        yield _wrong("model", f"ranks have different models, first in {name}", name)
        return
    differing = job.differing(starts)
    firsts = [rank.steps[0].before for rank in job.ranks if rank.steps and rank.steps[0].before]
    if differing and len(firsts) == job.size and not job.differing(firsts):
        differing = []  # made alike after a first forward, as for lazy layers
    if not differing:
        yield ok("start", "all ranks start with the same parameters")
        return
    first = differing[0]
    yield _wrong("start", f"ranks start with different parameters, first {first}: nothing broadcast them", first)


def _state(job: JobRecord) -> Iterator[Finding]:
    for number, steps in job.steps():
        options = [step.options for step in steps]
        for name in options[0]:
            values = [each.get(name) for each in options]
            if len(set(map(str, values))) > 1:
                yield _wrong("options", f"{name} differs at step {number}: {_by_rank(enumerate(values))}", name)
                return
        differing = job.differing([step.state for step in steps])
        if differing:
            first = differing[0]
            yield _wrong("state", f"the optimizer's state differs before step {number}, first for {first}", first)
            return
    yield ok("optimizer", "the same options and state on all ranks")


# --- data ---


def _data(job: JobRecord) -> Iterator[Finding]:
    rows = [[rank.steps[index].batches if index < len(rank.steps) else [] for rank in job.ranks]
            for index in range(max(len(rank.steps) for rank in job.ranks))]  # fmt: skip
    rows = [row for row in rows if all(row)]
    if not rows:
        yield note("data", "no forward of a model in training was seen", "")
        return
    alike = [len({tuple(batch.hash for batch in batches) for batches in row}) == 1 for row in rows]
    if all(alike):
        yield _wrong("same-data", "every rank reads the same batches: more ranks compute the same gradients again")
        return
    shared, total = _shared_samples(job, rows)
    if total and shared > max(job.size, OVERLAP * total):
        yield _wrong("overlap", f"the shards overlap: {shared} of {total} samples were read by several ranks")
        return
    yield ok("data", "each rank reads batches of its own")


def _shared_samples(job: JobRecord, rows: Sequence[Sequence[Sequence[object]]]) -> tuple[int, int]:
    """Return how many samples several ranks read, and how many were read, before a rank reads one again."""
    seen: list[set[str]] = [set() for _ in job.ranks]
    for row in rows:
        read = [[sample for batch in batches for sample in batch.samples] for batches in row]  # type: ignore[attr-defined]
        if any(len(set(own)) < len(own) or not before.isdisjoint(own) for before, own in zip(seen, read, strict=True)):
            break
        for before, own in zip(seen, read, strict=True):
            before.update(own)
    counts = Counter(sample for own in seen for sample in own)
    return sum(count > 1 for count in counts.values()), len(counts)


# --- the course of steps ---


def _course(job: JobRecord) -> Iterator[Finding]:
    longest = max(len(rank.steps) for rank in job.ranks)
    unused = ""
    for index in range(longest):
        having = [(rank.rank, rank.steps[index]) for rank in job.ranks if index < len(rank.steps)]
        done = [(rank, step) for rank, step in having if step.is_complete]
        passes = {rank: step.events.count(BACKWARD) for rank, step in done}
        batches = {rank: len(step.batches) for rank, step in done}
        for counts, what in ((passes, "backwards"), (batches, "batches")):
            if len(set(counts.values())) > 1 and _parts_after(job, index):
                different = f"step {index + 1} has different numbers of {what}: {_by_rank(counts.items())}"
                yield _wrong("skipped-step", f"{different}: a rank skipped a step")
                return
        waiting = {rank: step.events.count(FORWARD) - step.events.count(BACKWARD) for rank, step in having}
        if job.is_broken and max(waiting.values()) > min(waiting.values()) + 1:  # one may be within its backward
            rank = max(waiting, key=lambda each: waiting[each])
            left = f"step {index + 1} has a batch without a backward on rank {rank}"
            yield _wrong("skipped-step", f"{left}: that rank skipped a step")
            return
        own: dict[int, set[str]] = {rank: set(step.local) for rank, step in having if step.local}
        counts_of = Counter(name for names in own.values() for name in names)
        only = job.ordered({name for name, count in counts_of.items() if count < len(own)})
        for name in only[:1]:
            without = [rank for rank, names in own.items() if name not in names]
            unused = f"{name} has no gradient at step {index + 1} on {name_ranks(without)}, and has one elsewhere"
            if (job.is_broken and not all(step.is_complete for _, step in having)) or _parts_after(job, index):
                yield _wrong("unused", unused, name)
                return
    if job.is_broken and len(set(job.counts)) > 1 and not any(_is_of_clcomm(rank) for rank in job.ranks):
        taken = _by_rank(enumerate(job.counts))
        yield _wrong("skipped-step", f"ranks took different numbers of steps: {taken}: a rank skipped a step")
    elif unused:
        yield note("course", f"{unused}: it counted as zero there", "", cause="unused")
    else:
        yield ok("course", "all ranks take the same steps")


def _parts_after(job: JobRecord, index: int) -> bool:
    """Return whether the ranks part at a step or after it: in their parameters or their numbers of steps."""
    steps = [steps for number, steps in job.steps() if number > index]
    return job.is_broken or any(job.differing([each.after for each in row]) for row in steps)


# --- gradients ---


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

    def fit(self) -> tuple[float, float, np.ndarray]:
        """Return coefficient and distance of what is seen to the mean of the ranks' own, and the ranks' weights."""
        seen = np.concatenate([self.seen[name][0] for name in self.local])
        own = np.stack([np.concatenate([self.local[name][rank] for name in self.local]) for rank in self._ranks], 1)
        coefficient, distance = _coefficient(seen, own.mean(1))
        weights = np.linalg.lstsq(own, seen, rcond=None)[0]
        self.misfit = _distance(own @ weights, seen)
        self.norms = np.linalg.norm(own, axis=0)
        samples = np.array([step.samples for step in self.steps], float)
        self.by_samples = samples / samples.sum() if samples.any() else np.full(len(samples), 1 / len(samples))
        self.is_counted = bool(samples.all())
        #: The coefficient and distance to the mean by samples, and that of the two means.
        self.weighted = _coefficient(seen, own @ self.by_samples)
        self.uneven = _distance(own @ self.by_samples, own.mean(1))
        return coefficient, distance, weights

    @property
    def _ranks(self) -> range:
        return range(len(self.steps))

    @property
    def factor(self) -> float:
        """By what the program has multiplied the mean of a step's micro-batches, as far as it is known."""
        passes = max(1, self.steps[0].events.count(BACKWARD))
        total = passes * self.steps[0].factor
        return 1 / len(self.steps) if abs(total * len(self.steps) - 1) < SAME else 1.0


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


def _gradients(job: JobRecord) -> Iterator[Finding]:
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
    return _wrong("zero-grad", f"step {number} adds to the gradient of the step before, first in {first}", first)


def _unsynchronised(job: JobRecord, number: int, step: _Gradients, others: Sequence[_Gradients]) -> Finding | None:
    if step.is_clipped_early:
        return _clipped_early(number, step.clipped_apart[0])
    apart = step.apart(step.stepped)
    if not apart:
        return None
    own = [name for name in apart if step.is_own(name)]
    name = (own or apart)[0]
    if any(rank.averages_parameters for rank in job.ranks):
        return note("gradients", "each rank steps with its own, and the parameters are averaged: local SGD", "")
    if not own:
        return _wrong("apart", f"{name} differs between ranks at step {number}, and is no rank's own gradient", name)
    trained = {name for other in others for name in other.differing}
    if len(apart) < len(trained) and any(set(other.differing) - set(other.apart(other.stepped)) for other in others):
        missing = f"leaves out {len(apart)} of {len(trained)} gradients in the synchronisation"
        return _wrong("left-out", f"step {number} {missing}, first {name}", name)
    if any(SYNC in each.events[each.events.index(STEP) :] for each in step.steps if STEP in each.events):
        return _wrong("late-sync", f"step {number} steps before the gradients are synchronised, first {name}", name)
    steps = f"step {number} steps with each rank's own gradients"
    return _wrong("no-sync", f"{steps}, first {name}: nothing averages them", name)


def _clipped_early(number: int, name: str) -> Finding:
    clips = f"step {number} clips before the synchronisation"
    return _wrong("clip", f"{clips}, first {name}: each rank by its own norm", name)


def _scaled(job: JobRecord, found: Sequence[tuple[int, _Gradients]]) -> Finding:
    """Judge gradients that are the same on all ranks: are they the mean of the ranks' own?"""
    size, fits = job.size, []
    for number, step in found:
        coefficient, distance, weights = step.fit()
        fits.append((number, step, coefficient * step.factor, distance, weights))
    if not fits:
        return note("gradients", "no gradient was seen", "")
    name = next(iter(fits[0][1].local))
    for number, step, coefficient, distance, weights in fits:
        if (
            step.is_counted
            and step.uneven > NEAR / 2
            and step.weighted[1] > distance
            and distance < NEAR
            and abs(coefficient - 1) < NEAR
        ):
            sizes = _by_rank((rank, each.samples) for rank, each in enumerate(step.steps))
            return _wrong("unequal-batches", f"step {number} averages unequal batches without weights: {sizes}", name)
        if min(distance, step.weighted[1]) > NEAR and step.misfit < NEAR:
            shares = weights * step.norms
            if min(shares) > 0 and max(shares) < (1 + NEAR) * min(shares):
                return _clipped_early(number, name)
            listed = ", ".join(f"{weight:.3g} times rank {rank}'s" for rank, weight in enumerate(weights))
            return _wrong("weights", f"step {number} weighs the ranks' gradients unequally, {name}: {listed}", name)
    coefficients = [step.weighted[0] * step.factor if step.weighted[1] < distance else coefficient
                    for _, step, coefficient, distance, _ in fits]  # fmt: skip
    wrong = {"sum": (size, f"the sum over {size} ranks, {size} times the mean"),
             "divided-twice": (1 / size, f"divided by {size} twice, 1/{size} of the mean")}  # fmt: skip
    for cause, (factor, what) in wrong.items():
        if all(abs(each / factor - 1) < NEAR for each in coefficients):
            return _wrong(cause, f"they are {what}, first {name}", name)
    if any(min(distance, step.weighted[1]) > NEAR for _, step, _, distance, _ in fits):
        return note("gradients", "the same on all ranks, but not exactly their mean, as with lossy compression", "")
    return ok("gradients", f"the mean over {size} ranks at every step")


# --- replicas and end ---


def _replicas(job: JobRecord) -> Iterator[Finding]:
    rows = [*job.steps()]
    for number, steps in rows:
        for hashes, when in (([step.before for step in steps], "before"), ([step.after for step in steps], "after")):
            differing = job.differing(hashes)
            if differing:
                yield _wrong("replicas", f"ranks part {when} step {number}, first in {differing[0]}", differing[0])
                return
    if rows:
        yield ok("parameters", f"the same bits on all ranks after {len(rows)} step{'s' * (len(rows) > 1)}")


def _buffers(job: JobRecord) -> Iterator[Finding]:
    for number, steps in job.steps():
        differing = job.differing([step.buffers for step in steps if step.batches])
        if differing:
            own = f"they differ at step {number}, first {differing[0]}: each rank has those of its own batches"
            yield note("buffers", own, "broadcast them before an evaluation, or use SyncBatchNorm", cause="buffers",
                       first=differing[0])  # fmt: skip
            return


def _end(job: JobRecord) -> Iterator[Finding]:
    failed = next((rank for rank in job.ranks if _is_of_clcomm(rank)), None)
    if failed is not None:
        yield _wrong("mismatch", failed.error)
    elif job.is_stuck and any(rank.steps for rank in job.ranks):
        waits = [f"rank {rank.rank} after {_last(rank)}" for rank in job.ranks]
        yield _wrong("hang", f"the ranks wait for each other: {', '.join(waits)}")


def _last(rank: RankRecord) -> str:
    events = [event for step in rank.steps for event in step.events]
    return f"{events[-1]} of step {len(rank.steps)}" if events else "its start"


_ANY = ("model", "start", "data", "course", "optimizer", "gradients", "parameters")
#: Each question, and those whose problems have a problem there as a consequence.
_CHECKS: tuple[tuple[Callable[[JobRecord], Iterator[Finding]], tuple[str, ...]], ...] = (
    (_start, ()), (_data, ()), (_course, ("model",)), (_state, ()), (_gradients, ("model", "course")),
    (_replicas, ("model", "start", "course", "optimizer", "gradients")), (_buffers, ()), (_end, _ANY),
)  # fmt: skip
