"""Judges the ranks' records: whether they train as one process would with the whole batch, and why not.

Works on records alone. A gradient is right where it is the mean of the ranks' own ones, by samples where batches
differ; so nothing has to be computed again by one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from clcomm.base.console.finding import PROBLEM, Finding, note, ok
from clcomm.base.errors import name_ranks
from clcomm.tools.verify.gradients import judge_gradients
from clcomm.tools.verify.job import JobRecord
from clcomm.tools.verify.record import BACKWARD, FORWARD, Batch, RankRecord, Step
from clcomm.tools.verify.watcher import by_rank, wrong

#: The share of samples that several ranks read above which their shards overlap: samplers repeat a few to fill up.
OVERLAP = 0.02
_CLASSES_OF_CLCOMM = ("MismatchError", "DivergenceError")


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
        yield wrong("model", f"ranks have different models, first in {name}", name)
        return
    differing = job.differing(starts)
    firsts = [rank.steps[0].before for rank in job.ranks if rank.steps and rank.steps[0].before]
    if differing and len(firsts) == job.size and not job.differing(firsts):
        differing = []  # made alike after a first forward, as for lazy layers
    if not differing:
        yield ok("start", "all ranks start with the same parameters")
        return
    first = differing[0]
    yield wrong("start", f"ranks start with different parameters, first {first}: nothing broadcast them", first)


def _state(job: JobRecord) -> Iterator[Finding]:
    for number, steps in job.steps():
        options = [step.options for step in steps]
        for name in options[0]:
            values = [each.get(name) for each in options]
            if len(set(map(str, values))) > 1:
                yield wrong("options", f"{name} differs at step {number}: {by_rank(enumerate(values))}", name)
                return
        differing = job.differing([step.state for step in steps])
        if differing:
            first = differing[0]
            yield wrong("state", f"the optimizer's state differs before step {number}, first for {first}", first)
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
        yield wrong("same-data", "every rank reads the same batches: more ranks compute the same gradients again")
        return
    shared, total = _shared_samples(job, rows)
    if total and shared > max(job.size, OVERLAP * total):
        yield wrong("overlap", f"the shards overlap: {shared} of {total} samples were read by several ranks")
        return
    yield ok("data", "each rank reads batches of its own")


def _shared_samples(job: JobRecord, rows: Sequence[Sequence[Sequence[Batch]]]) -> tuple[int, int]:
    """Return how many samples several ranks read, and how many were read, before a rank reads one again."""
    seen: list[set[str]] = [set() for _ in job.ranks]
    for row in rows:
        read = [[sample for batch in batches for sample in batch.samples] for batches in row]
        if any(len(set(own)) < len(own) or not before.isdisjoint(own) for before, own in zip(seen, read, strict=True)):
            break
        for before, own in zip(seen, read, strict=True):
            before.update(own)
    counts = Counter(sample for own in seen for sample in own)
    return sum(count > 1 for count in counts.values()), len(counts)


# --- the course of steps ---

#: A rank's step by its number.
_Row = list[tuple[int, Step]]


def _course(job: JobRecord) -> Iterator[Finding]:
    unused = ""
    for index in range(max(len(rank.steps) for rank in job.ranks)):
        row = [(rank.rank, rank.steps[index]) for rank in job.ranks if index < len(rank.steps)]
        skipped = _different_counts(job, index, row) or _left_batch(job, row)
        if skipped:
            yield wrong("skipped-step", f"step {index + 1} has {skipped}")
            return
        name, without = _first_unused(job, row)
        if name:
            unused = f"{name} has no gradient at step {index + 1} on {name_ranks(without)}, and has one elsewhere"
            if (job.is_broken and not all(step.is_complete for _, step in row)) or _parts_after(job, index):
                yield wrong("unused", unused, name)
                return
    if job.is_broken and len(set(job.counts)) > 1 and not any(_is_of_clcomm(rank) for rank in job.ranks):
        taken = by_rank(enumerate(job.counts))
        yield wrong("skipped-step", f"ranks took different numbers of steps: {taken}: a rank skipped a step")
    elif unused:
        yield note("course", f"{unused}: it counted as zero there", "", cause="unused")
    else:
        yield ok("course", "all ranks take the same steps")


def _different_counts(job: JobRecord, index: int, row: _Row) -> str:
    """Return in words what ranks that completed a step did in different numbers; "" where that changes nothing."""
    done = [(rank, step) for rank, step in row if step.is_complete]
    passes = {rank: step.events.count(BACKWARD) for rank, step in done}
    batches = {rank: len(step.batches) for rank, step in done}
    for counts, of in ((passes, "backwards"), (batches, "batches")):
        if len(set(counts.values())) > 1 and _parts_after(job, index):
            return f"different numbers of {of}: {by_rank(counts.items())}: a rank skipped a step"
    return ""


def _left_batch(job: JobRecord, row: _Row) -> str:
    """Return in words which rank left a batch without a backward in a job that is broken; "" if none did."""
    waiting = {rank: step.events.count(FORWARD) - step.events.count(BACKWARD) for rank, step in row}
    if not job.is_broken or max(waiting.values()) <= min(waiting.values()) + 1:  # one may be within its backward
        return ""
    rank = max(waiting, key=lambda each: waiting[each])
    return f"a batch without a backward on rank {rank}: that rank skipped a step"


def _first_unused(job: JobRecord, row: _Row) -> tuple[str, list[int]]:
    """Return the first parameter that has a gradient on some ranks alone, and the others; "" if there is none."""
    own = {rank: set(step.local) for rank, step in row if step.local}
    counts = Counter(name for names in own.values() for name in names)
    only = job.ordered({name for name, count in counts.items() if count < len(own)})
    if not only:
        return "", []
    return only[0], [rank for rank, names in own.items() if only[0] not in names]


def _parts_after(job: JobRecord, index: int) -> bool:
    """Return whether the ranks part at a step or after it: in their parameters or their numbers of steps."""
    steps = [steps for number, steps in job.steps() if number > index]
    return job.is_broken or any(job.differing([each.after for each in row]) for row in steps)


# --- replicas and end ---


def _replicas(job: JobRecord) -> Iterator[Finding]:
    if any(rank.averages_parameters for rank in job.ranks):
        return  # they are to differ between exchanges
    rows = [*job.steps()]
    for number, steps in rows:
        for hashes, when in (([step.before for step in steps], "before"), ([step.after for step in steps], "after")):
            differing = job.differing(hashes)
            if differing:
                yield wrong("replicas", f"ranks part {when} step {number}, first in {differing[0]}", differing[0])
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
        yield wrong("mismatch", failed.error)
    elif job.is_stuck and any(rank.steps for rank in job.ranks):
        waits = [f"rank {rank.rank} after {_last(rank)}" for rank in job.ranks]
        yield wrong("hang", f"the ranks wait for each other: {', '.join(waits)}")


def _last(rank: RankRecord) -> str:
    events = [event for step in rank.steps for event in step.events]
    return f"{events[-1]} of step {len(rank.steps)}" if events else "its start"


_ANY = ("model", "start", "data", "course", "optimizer", "gradients", "parameters")
#: Each question, and those whose problems have a problem there as a consequence.
_CHECKS: tuple[tuple[Callable[[JobRecord], Iterator[Finding]], tuple[str, ...]], ...] = (
    (_start, ()), (_data, ()), (_course, ("model",)), (_state, ()), (judge_gradients, ("model", "course")),
    (_replicas, ("model", "start", "course", "optimizer", "gradients")), (_buffers, ()), (_end, _ANY),
)  # fmt: skip
