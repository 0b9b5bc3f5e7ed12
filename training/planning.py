"""A plan: the strategies for a job that is not started yet, each tried on few ranks for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from clcomm.base.errors import ArgumentError, DataError
from clcomm.base.units import format_size
from clcomm.comm.costs.jobs import EACH_STEP, HIERARCHICAL, RING, SELDOM, ZERO3, Job, Strategy, Workload, forecast
from clcomm.comm.costs.model import Cluster, Cost
from clcomm.insight.report.elements import Column, Table, count, milliseconds
from clcomm.insight.report.forecasting import cluster_of, model_memory, optimizer_buffers, workload_of
from clcomm.insight.report.report import LeftOut, Report
from clcomm.insight.report.run_costs import Analysis, mean_step
from clcomm.insight.report.step_parts import CORE
from clcomm.sync.policies import parse_policy
from clcomm.sync.policies.choose import POLICIES
from clcomm.sync.policies.policy import Policy
from training.trial import HostMemory

#: How far a forecast peak may be from the run's, as a share.
MARGIN = 0.05
#: The most ranks on which a strategy is tried, unless more divide each layer.
TRIED = 4
#: Activations are computed again in backward: a way of its own, or with another.
RECOMPUTE = "recompute"
YES, NO, PERHAPS = "yes", "no", "perhaps"
_COLUMNS = (
    Column("name", "strategy", "text"), Column("fits", "fits", "text"), Column("peak_nbytes", "peak a host", "size"),
    Column("model_nbytes", "model", "size"), Column("rest_nbytes", "the rest", "size"),
    Column("step_s", "step", "ms"), Column("exposed_s", "communication", "ms"),
    Column("samples_per_s", "samples/s", "right"), Column("why", "why", "text"),
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way to divide a job's work.

    options: the program's, for a trial. zero: the stage. division: ranks that divide a model's layers, each of them or
    in stages. policy_every: steps from one exchange of the parameters to the next; 0: gradients are reduced in each
    step. least_steps: of a trial that is to have an exchange.
    """

    name: str
    options: tuple[str, ...] = ()
    zero: int = 0
    division: int = 1
    policy_every: int = 0
    least_steps: int = 1

    def __str__(self) -> str:
        return self.name

    def options_for(self, steps: int) -> tuple[str, ...]:
        """Return the program's options for so many steps, of which a policy's last but one exchanges parameters."""
        return tuple(word.replace("h=EVERY", f"h={steps - 1}") for word in self.options)

    def ranks_tried(self, ranks: int, most: int | None = None) -> int:
        """Return the ranks of a trial for a job with so many a host: groups that divide layers stay whole."""
        return self.division * max(1, min(most or TRIED, ranks) // self.division)


class TrialResult(NamedTuple):
    """A trial's report, and the most memory that its job held on the host.

    slowdown: the factor by which a rank of the planned job computes longer, where more ranks share a core. shared:
    whether the trial's ranks shared cores, so that a step includes waits for one.
    """

    analysis: Analysis
    peak: HostMemory
    slowdown: float = 1.0
    shared: bool = False


class Row(NamedTuple):
    """A strategy on the planned job; times in seconds."""

    way: Way
    peak_nbytes: int
    model_nbytes: int
    step_s: float
    exposed_s: float
    samples_per_s: float

    def fits(self, memory: int) -> str:
        if self.peak_nbytes * (1 + MARGIN) <= memory:
            return YES
        return NO if self.peak_nbytes * (1 - MARGIN) > memory else PERHAPS


def parse_way(text: str) -> Way:
    """Return the way of "dp", "zero2", "tp4", "pp2", "tp2+pp2", "recompute", "pp2+recompute" or "diloco:h=50".

    Raises ArgumentError for others.
    """
    first, _, last = text.rpartition("+")
    if first.rstrip("0123456789") == "tp" and last.startswith("pp"):
        layers, stages = parse_way(first), parse_way(last)
        return replace(
            layers, name=text, options=(*layers.options, *stages.options), division=layers.division * stages.division
        )
    if last == RECOMPUTE:
        way = parse_way(first or EACH_STEP)
        if way.policy_every:
            raise ArgumentError(f"--strategies: expected no policy with {RECOMPUTE}, got {text!r}")
        return replace(way, name=text, options=(*way.options, f"--{RECOMPUTE}"))
    kind, number = text.rstrip("0123456789"), text[len(text.rstrip("0123456789")) :]
    if text == EACH_STEP:
        return Way(text)
    if kind == "zero" and number in ("1", "2", "3"):
        return Way(text, ("--zero", number), zero=int(number))
    if kind in ("tp", "pp") and number and int(number) > 1:
        return Way(text, (f"--{kind}", str(int(number))), division=int(number))
    policy = parse_policy(text) if text.partition(":")[0] in [each.name for each in POLICIES] else None
    if policy is None:
        raise ArgumentError(
            f"--strategies: expected dp, zero1 to zero3, tp2 or pp2 or more, tp2+pp2, {RECOMPUTE}, alone or after one "
            f"of these and a plus, or a policy such as diloco:h=50, got {text!r}"
        )
    settings = str(policy).replace(f"h={policy.h}", "h=EVERY", 1)
    return Way(text, ("--policy", settings), policy_every=policy.h, least_steps=_least_every(policy) + 1)


def _least_every(policy: Policy) -> int:
    """Return the least number of steps from 2 up after which a policy of these settings may exchange parameters."""
    for every in range(2, policy.h):
        with suppress(ArgumentError):  # as of fragments that take turns
            return replace(policy, h=every).h
    return policy.h


def rows_of(tried: Mapping[Way, TrialResult], job: Job, link: Cost) -> list[Row]:
    """Return what each way takes on a job; `tried` begins with plain data parallelism."""
    plain, buffers = next(iter(tried.values())).analysis, buffers_of(tried)
    return [_row(way, each, plain, buffers, job, link) for way, each in tried.items()]


def buffers_of(tried: Mapping[Way, TrialResult]) -> int:
    """Return how many arrays as large as the parameters the optimizer of the first, plain trial keeps."""
    plain = next(iter(tried.values())).analysis
    return optimizer_buffers(plain, workload_of(plain)) or 0


def peak_of(way: Way, tried: TrialResult, buffers: int, job: Job) -> tuple[int, int]:
    """Return the most bytes on a host of a job, and those of the model in them.

    What the model takes on so many ranks follows from formulas (docs/zero.md). Everything else is a rank's as it was in
    the trial: activations, the arena, the interpreter, and MPI, also what that shares. The first rank may have more,
    and a training set is there once.
    """
    work, ranks = workload_of(tried.analysis, checks_policy=False), tried.analysis.run.world_size
    groups, wanted = max(1, ranks // way.division), max(1, job.ranks_per_host // way.division)
    then, mean = model_memory(Job(1, groups), work, way.zero, buffers), _mean_stage(tried.analysis)
    model = round(mean * job.ranks_per_host * sum(model_memory(Job(job.hosts, wanted), work, way.zero, buffers)))
    shared = mean * (then.parameters + (then.in_flight if way.zero > 1 else then.gradients))
    alone = mean * sum(then) - shared
    own = tried.peak.own - ranks * alone
    # Of stages the largest may be any rank's, not the first one's alone.
    another = tried.peak.own / ranks if tried.analysis.run.figures["pipeline"] else tried.peak.another
    own += (job.ranks_per_host - ranks) * (another - alone)
    common = job.ranks_per_host * (tried.peak.common / ranks - shared)
    return model + round(own + common) + tried.peak.data, model


def _mean_stage(analysis: Analysis) -> float:
    """Return the parameters of a mean rank of a pipeline over those of rank 0, whose sizes a report has; 1 without."""
    stages = analysis.run.figures["pipeline"]
    if not stages or not stages["parameter_bytes"][0]:
        return 1.0
    mean: float = sum(stages["parameter_bytes"]) / len(stages["parameter_bytes"]) / stages["parameter_bytes"][0]
    return mean


def _row(way: Way, tried: TrialResult, plain: Analysis, buffers: int, job: Job, link: Cost) -> Row:
    analysis = plain if way.policy_every else tried.analysis  # a policy's steps compute what plain ones do
    work = workload_of(analysis)
    if tried.shared:
        work = replace(work, other_s=work.other_s + dict(mean_step(analysis)).get(CORE, 0.0))
    work = _slower(work, tried.slowdown)
    groups = Job(job.hosts, max(1, job.ranks_per_host // way.division))
    cluster, strategy, how = _cluster(plain, link, groups.ranks_per_host), Strategy(), HIERARCHICAL
    if way.policy_every:
        strategy = Strategy(SELDOM, way.policy_every)
    elif way.zero:
        work = replace(work, overlap=False)
        if way.zero == 3 and job.hosts > 1:  # on one host parameters lie in common memory, and nothing is gathered
            strategy, how = Strategy(ZERO3), RING
    found = forecast(work, cluster, groups, how, strategy)
    peak, model = peak_of(way, tried, buffers, job)
    batch = float(analysis.run.figures["batch_size"])
    rate = batch * groups.ranks / found.step_s if found.step_s else 0.0
    return Row(way, peak, model, found.step_s, found.exposed_s, rate)


def _slower(work: Workload, factor: float) -> Workload:
    return replace(
        work, forward_s=factor * work.forward_s, backward_s=factor * work.backward_s, other_s=factor * work.other_s
    )


def _cluster(plain: Analysis, link: Cost, ranks_per_host: int) -> Cluster:
    """Return hosts like that of the trial; where its few steps fit no cost of a call, by what a byte took."""
    cost = Cost(0.0, dict(mean_step(plain)).get(plain.moving, 0.0) / sum(map(sum, plain.layout)))
    try:
        return cluster_of(plain, link, ranks_per_host, cost)
    except DataError:
        return Cluster({plain.run.world_size: cost}, link)


def plan_of(
    rows: Sequence[Row],
    left_out: Sequence[LeftOut],
    job: Job,
    memory: int,
    title: str,
    remedy: Callable[[Row], str],
) -> Report:
    """Return the plan as a report, the fastest that fits first.

    Raises ArgumentError where none fits; `remedy` says what would, of the row that needs least.
    """
    ranked = sorted(rows, key=lambda row: ((YES, PERHAPS, NO).index(row.fits(memory)), -row.samples_per_s))
    best = ranked[0]
    if best.fits(memory) != YES:
        least = min(rows, key=lambda row: row.peak_nbytes)
        needed = format_size(least.peak_nbytes * (1 + MARGIN))
        raise ArgumentError(
            f"--memory: expected {needed} or more a host for {count(job.ranks_per_host, 'rank')} there "
            f"({least.way.name}, the least of {len(rows)} strategies), got {format_size(memory)}; {remedy(least)}"
        )
    headline = [
        f"{best.way.name}: {best.samples_per_s:,.4g} samples/s, {milliseconds(best.step_s)} a step, of which "
        f"{milliseconds(best.exposed_s)} communication; it holds {format_size(best.peak_nbytes)} of a host's "
        f"{format_size(memory)}. {_reason(best, ranked, memory)}",
        f"A strategy fits if {MARGIN:.0%} more than its peak is there. Programs' pages come on top where no other "
        "process has loaded them, and kernels that are not built yet.",
    ]
    table = Table("plan", f"{count(job.ranks, 'rank')} on {count(job.hosts, 'host')}", _COLUMNS,
                  [_shown(row, best, job, memory) for row in ranked], "Step and communication in ms.")  # fmt: skip
    return Report(title, {"memory": memory, "best": best.way.name}, [], headline, [table], [], list(left_out))


def _reason(best: Row, ranked: Sequence[Row], memory: int) -> str:
    faster = [row for row in ranked if row.samples_per_s > best.samples_per_s]
    if faster:
        names = ", ".join(row.way.name for row in faster)
        return f"It is the fastest that fits; {names} would be faster, but for the memory."
    return "It is the fastest, and fits." if len(ranked) > 1 else "It fits."


def _shown(row: Row, best: Row, job: Job, memory: int) -> dict[str, object]:
    fits, more = row.fits(memory), row.peak_nbytes - best.peak_nbytes
    if row is best:
        why = "the fastest that fits"
    elif fits == NO:
        why = f"lacks {format_size(row.peak_nbytes * (1 + MARGIN) - memory)}"
    else:
        slower = 1 - row.samples_per_s / best.samples_per_s if best.samples_per_s else 0.0
        speed = f"{slower:.0%} slower" if slower >= 0 else f"{-slower:.0%} faster"
        why = f"{speed}, {format_size(abs(more))} {'more' if more > 0 else 'less'}"
        why += f"; within {MARGIN:.0%} of --memory" if fits == PERHAPS else ""
    return {
        "name": row.way.name, "fits": fits, "peak_nbytes": row.peak_nbytes, "model_nbytes": row.model_nbytes,
        "rest_nbytes": row.peak_nbytes - row.model_nbytes, "step_s": row.step_s, "exposed_s": row.exposed_s,
        "samples_per_s": f"{row.samples_per_s:,.4g}", "why": why,
    }  # fmt: skip


def most_ranks(way: Way, tried: TrialResult, buffers: int, job: Job, memory: int) -> int:
    """Return the most ranks a host, up to the job's, with which a way fits; 0: none does."""
    able = (n for n in range(job.ranks_per_host, 0, -1) if n % way.division == 0)
    fitting = (n for n in able if peak_of(way, tried, buffers, Job(job.hosts, n))[0] * (1 + MARGIN) <= memory)
    return next(fitting, 0)
