"""The forecast of a run on other jobs: what a rank computes from its report, the network from the user."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Sequence

from clcomm.base.console.option_types import number
from clcomm.base.errors import ArgumentError, DataError
from clcomm.base.flat_space.layout import FlatLayout, ShardPlan
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.units import format_size
from clcomm.comm.costs.jobs import (
    EACH_STEP,
    HIERARCHICAL,
    RING,
    SELDOM,
    WAYS,
    ZERO3,
    Job,
    JobForecast,
    Strategy,
    Workload,
)
from clcomm.comm.costs.jobs import forecast as forecast_of
from clcomm.comm.costs.model import Cluster, Cost
from clcomm.comm.stats.events import Row
from clcomm.insight.report import run_costs
from clcomm.insight.report.elements import Column, Table, milliseconds, written
from clcomm.insight.report.report import LeftOut, Report, subtitle
from clcomm.insight.report.run_costs import Analysis, mean_step
from clcomm.insight.report.sentences import title
from clcomm.insight.report.step_parts import COMPUTING, CORE, EITHER, WAIT
from clcomm.sync.policies import parse_policy
from clcomm.sync.policies.outer import DiLoCo, LocalSGD

#: Of forward and backward together, the part that is backward: two products for each of forward's.
BACKWARD = 2 / 3
_BYTES_PER_S = {"bit/s": 0.125, "kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "MB/s": 1e6, "GB/s": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COLUMNS = (
    Column("ranks", "ranks"), Column("hosts", "hosts"), Column("way", "all-reduce", "text"),
    Column("step_s", "step", "ms"), Column("communication_s", "communication", "ms"),
    Column("exposed_s", "exposed", "ms"), Column("efficiency", "efficiency", "share"),
    Column("sent_nbytes", "sent a rank", "size"), Column("state_nbytes", "model a rank", "size"),
    Column("best", "best buckets", "right"), Column("best_s", "step with them", "ms"),
)  # fmt: skip


def parse_link(text: str) -> Cost:
    """Return the cost of a message on a link such as "100Gbit/s,2us": its bandwidth each way, and its latency."""
    rate, _, delay = text.replace(" ", "").lower().partition(",")
    try:
        bytes_per_s, alpha_s = _quantity(rate, _BYTES_PER_S), _quantity(delay, _SECONDS)
        return Cost(alpha_s, 1 / bytes_per_s)
    except (ValueError, ZeroDivisionError):
        units = ", ".join(_BYTES_PER_S)
        raise ArgumentError(
            f"--link: expected a rate (in {units}) and a latency (in s, ms, us, ns) such as 100Gbit/s,2us, got {text!r}"
        ) from None


def _quantity(text: str, units: dict[str, float]) -> float:
    """Return a number with one of these units, in lower case; ValueError for any other text."""
    figure = text.rstrip("abcdefghijklmnopqrstuvwxyz/")
    factors = {name.lower(): factor for name, factor in units.items()}
    try:
        return float(number()(figure)) * factors[text[len(figure) :]]
    except (ArgumentTypeError, KeyError) as error:
        raise ValueError(text) from error


def parse_strategy(text: str) -> Strategy:
    """Return what is communicated under "dp", "zero3", "local:h=8" or "diloco:h=50"; ArgumentError for others."""
    if text in (EACH_STEP, ZERO3):
        return Strategy(text)
    policy = parse_policy(text) if text.partition(":")[0] in (LocalSGD.name, DiLoCo.name) else None
    if policy is None:
        raise ArgumentError(
            f"--strategy: expected dp, zero3, local:h=8 or diloco:h=50, got {text!r}: a report has neither "
            "the sizes of activations nor what other policies select"
        )
    return Strategy(SELDOM, policy.h)


def workload_of(analysis: Analysis, overlap: bool | None = None, *, checks_policy: bool = True) -> Workload:
    """Return a rank's mean step of a run; DataError, in one line, for a run that does not tell it.

    overlap: whether buckets are reduced during backward; None: as in the run. checks_policy: whether a run that
    reduces no gradients is refused; of it only the sizes serve.
    """
    settings = analysis.run.figures["settings"] or {}
    parts = dict(mean_step(analysis))
    if not parts:
        raise DataError("expected a report with the time of its steps; `--report` of the examples has it")
    if not analysis.layout:
        raise DataError("expected a report with its plan of buckets; `--report` of the examples has it")
    if checks_policy and settings.get("policy", "none") not in ("none", "-"):
        raise DataError(
            f"expected a run with --policy none, whose steps reduce gradients, got --policy {settings['policy']}; give "
            "the report of such a run, from which `--strategy local:h=8` or `diloco:h=50` forecasts the policy"
        )
    without = (WAIT, EITHER, CORE, analysis.moving)
    both_s = parts.get(COMPUTING, 0.0)
    other_s = sum(seconds for name, seconds in parts.items() if name not in (*without, COMPUTING))
    return Workload(
        tuple(nbytes for bucket in analysis.layout for nbytes in bucket)[::-1],
        tuple(sum(bucket) for bucket in analysis.layout),
        (1 - BACKWARD) * both_s,
        BACKWARD * both_s,
        other_s,
        analysis.reducing["hidden_s"] > 0 if overlap is None else overlap,
    )


def cluster_of(analysis: Analysis, link: Cost, ranks_per_host: int, otherwise: Cost | None = None) -> Cluster:
    """Return hosts like the run's, joined by a link; DataError where ranks of a host meet for an unknown time.

    Sizes that the run had take what they took there. otherwise: the cost of other sizes where nothing else tells it.
    """
    if ranks_per_host == 1:
        return Cluster({}, link)
    if (analysis.run.figures["hosts"] or 1) > 1 or not analysis.several:
        raise _unknown(ranks_per_host, "the run had several hosts" if analysis.several else "the run had one rank")
    why, ranks, times = _why_unknown(analysis), analysis.run.world_size, run_costs.own_times(analysis.buckets)
    known = otherwise if why or analysis.costs is None else analysis.costs.cost
    if known is None and not (times and ranks == ranks_per_host):
        raise _unknown(ranks_per_host, why)
    cost = known or Cost(math.nan, math.nan)
    return Cluster({ranks: run_costs.MeasuredCost(cost.alpha_s, cost.beta_s_per_byte, times)}, link)


def _why_unknown(analysis: Analysis) -> str:
    """Return why the time of other bucket sizes than the run's is not known; "": it is."""
    if analysis.costs is None:
        return str(analysis.own_costs)
    if analysis.costs.fit is None and (off := _stored_error(analysis)) > run_costs.DOUBTFUL:
        return f"half of what `clcomm tune` measured here differs from its fit by {off:.0%} or more; measure again"
    return ""


def _unknown(ranks_per_host: int, why: str) -> DataError:
    return DataError(
        f"--ranks-per-host {ranks_per_host}: the time of an all-reduce within a host is not known: {why}; "
        "--ranks-per-host 1 does without it"
    )


def _stored_error(analysis: Analysis) -> float:
    """Return the median error of what `clcomm tune` measured for the run's transport."""
    own = [each for each in analysis.run.figures["ceilings"] if each["transport"] == analysis.reductions["transport"]]
    return max((float(each["median_error"]) for each in own), default=0.0)


def report_of(
    analysis: Analysis, link: Cost, jobs: Sequence[Job], asked: Job, strategy: Strategy, overlap: bool | None
) -> Report:
    """Return the forecasts as a report: the asked job in each way, and all jobs in the one that clcomm has for it."""
    work, cluster = workload_of(analysis, overlap), cluster_of(analysis, link, asked.ranks_per_host)
    ways = [RING] if strategy.kind == ZERO3 else list(WAYS) if cluster.predicts else [HIERARCHICAL]
    found = [forecast_of(work, cluster, asked, way, strategy) for way in ways]
    if math.isnan(found[0].step_s):
        raise _unknown(asked.ranks_per_host, _why_unknown(analysis))
    grown = [forecast_of(work, cluster, job, ways[0], strategy) for job in jobs]
    buffers = optimizer_buffers(analysis, work)
    waits_s = sum(seconds for name, seconds in mean_step(analysis) if name in (WAIT, EITHER, CORE))
    headline = [
        f"{asked.ranks:,} ranks on {asked.hosts:,} hosts, a link of {written(link.alpha_s, 'time')} and "
        f"{8e-9 / link.beta_s_per_byte:,.4g} Gbit/s each way: {milliseconds(found[0].step_s)} a step, of which "
        f"{milliseconds(found[0].exposed_s)} communication that computing does not hide.",
        f"A rank computes {milliseconds(work.compute_s)} of a step with the batch of this run. In this run "
        f"{milliseconds(waits_s)} more were waits for ranks and cores, which a forecast leaves out.",
    ]
    rows = [[_row(each, work, strategy, buffers) for each in several] for several in (found, grown)]
    note = "Times in ms. Efficiency: computing over the step."
    tables = [
        Table("ways", "This job, by how gradients are reduced", _COLUMNS, rows[0]),
        Table("jobs", "Jobs of other sizes", _COLUMNS, rows[1], note),
    ]
    why = "the file does not hold the size of the optimizer's state"
    missing = [] if buffers is not None else [LeftOut("model a rank", why)]
    if not cluster.predicts:
        missing.append(LeftOut("other bucket sizes and ways", _why_unknown(analysis)))
    figures = {"link_alpha_s": link.alpha_s, "link_beta_s_per_byte": link.beta_s_per_byte, "compute_s": work.compute_s}
    return Report(
        f"Forecast of {title(analysis)}", figures, [], headline, [table.filled() for table in tables], [], missing,
        subtitle(analysis.run),
    )  # fmt: skip


def optimizer_buffers(analysis: Analysis, work: Workload) -> int | None:
    """Return how many arrays as large as the parameters the optimizer keeps; None: not known."""
    held, settings = analysis.run.figures["optimizer_state_bytes"], analysis.run.figures["settings"] or {}
    if held is None:
        return None
    divided = settings.get("zero", "0") != "0" or settings.get("sharded_optimizer") == "True"
    found: int = round(held * (analysis.run.world_size if divided else 1) / sum(work.tensors))
    return found


def model_memory(job: Job, work: Workload, stage: int, buffers: int) -> MemoryUse:
    """Return the bytes of parameters, gradients and the optimizer's state on a rank; activations are not in them.

    Args:
        stage: of ZeRO; 0: nothing is divided.
        buffers: of the optimizer's state, each as large as the parameters.
    """
    layout = FlatLayout(ParameterSpec(str(at), (-(-nbytes // 4),), "float32") for at, nbytes in enumerate(work.tensors))
    plan = ShardPlan(layout, job.ranks, max(work.buckets) if stage > 1 else layout.span)
    return MemoryUse.expected(plan, stage, buffers, shares=job.hosts == 1, in_place=True)


def _row(found: JobForecast, work: Workload, strategy: Strategy, buffers: int | None) -> Row:
    best, stage = found.best, 3 if strategy.kind == ZERO3 else 0
    size = None if best is None else "per tensor" if best.bucket_size is None else format_size(best.bucket_size)
    return {
        "ranks": found.job.ranks, "hosts": found.job.hosts, "way": found.way, "step_s": found.step_s,
        "communication_s": found.communication_s, "exposed_s": found.exposed_s,
        "efficiency": work.compute_s / found.step_s if found.step_s else None, "sent_nbytes": found.sent_nbytes,
        "state_nbytes": None if buffers is None else sum(model_memory(found.job, work, stage, buffers)), "best": size,
        "best_s": None if best is None else best.seconds + work.other_s,
    }  # fmt: skip
