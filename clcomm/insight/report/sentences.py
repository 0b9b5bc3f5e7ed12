"""The sentences at the top of a report."""

from __future__ import annotations

from typing import NamedTuple

from clcomm.base.units import format_size
from clcomm.comm.stats.steps import WARM_UP_STEPS
from clcomm.insight.report.elements import count, written
from clcomm.insight.report.elements import milliseconds as _ms
from clcomm.insight.report.run_costs import Analysis
from clcomm.insight.report.wait_causes import causes

#: A rank stands out if it came last this many times as often as its even share, and at least _LEAST_SEEN times.
_STANDS_OUT, _LEAST_SEEN = 1.5, 10
#: Synchronisation is mostly waiting if at least this share of it is.
_MOSTLY = 0.75


def title(analysis: Analysis) -> str:
    figures = analysis.run.figures
    what = " on ".join(figures[name] for name in ("model", "dataset") if figures[name])
    hosts = f" of {figures['hosts']} hosts" if (figures["hosts"] or 1) > 1 else ""
    return f"{what or 'A run'}, {count(analysis.run.world_size, 'rank')}{hosts}"


class Tile(NamedTuple):
    """A large figure and its caption."""

    value: str
    caption: str


def tiles(analysis: Analysis) -> list[Tile]:
    """Return the figures that summarise a run."""
    figures, step_s = analysis.run.figures, analysis.per_step(analysis.training_s)
    found, without = [], _after_warm_up(analysis)
    if figures["images_per_s"]:
        speed = f"{figures['images_per_s']:,.0f}"
        found.append(Tile(speed, f"images/s{without or _speed_after_warm_up(analysis)}"))
    if step_s is not None:
        found.append(Tile(_ms(step_s), f"a mean step{without or ' of all'}"))
    if analysis.sync_share is not None:
        found.append(Tile(f"{analysis.sync_share:.1%}", "of it synchronising"))
    if figures["test_accuracy"] is not None:
        found.append(Tile(f"{figures['test_accuracy']:.2%}", "test accuracy"))
    return found


def headline(analysis: Analysis) -> list[str]:
    """Return the sentences, the most important first."""
    found = causes(analysis)
    why = [cause.sentence for cause in found]
    last = "" if any(cause.rank >= 0 for cause in found) else arrivals(analysis)
    lines = [*problems(analysis), pace(analysis), *why, sharing(analysis), last, detour(analysis)]
    return [line for line in [*lines, overlap(analysis), advice(analysis), start(analysis), upkeep(analysis)] if line]


def problems(analysis: Analysis) -> list[str]:
    """Return the problems: missing files, failures, differing replicas."""
    found = []
    missing = analysis.run.world_size - len(analysis.run.ranks)
    if missing:
        there = {record["rank"] for record in analysis.run.ranks}
        names = [str(rank) for rank in range(analysis.run.world_size) if rank not in there]
        found.append(
            f"{count(missing, 'rank')} of {analysis.run.world_size} missing here: {', '.join(names[:10])}"
            f"{', ...' if missing > 10 else ''}; all figures are of the others."
        )
    failed = sum(row["failures"] for row in analysis.counts["operations"])
    if failed:
        found.append(f"{count(failed, 'call')} failed.")
    mismatches = max((record["replica_mismatches"] or 0 for record in analysis.run.ranks), default=0)
    if mismatches:
        found.append(f"The replicas differed {count(mismatches, 'time')}: do not trust the trained parameters.")
    return found


def pace(analysis: Analysis) -> str:
    """Return the run's length, speed and accuracy."""
    figures, parts, without = analysis.run.figures, [], _after_warm_up(analysis)
    if analysis.all_steps:
        parts.append(f"{count(round(analysis.all_steps), 'step')}")
    step_s = analysis.per_step(analysis.training_s)
    if step_s is not None:
        parts.append(f"{_ms(step_s)} each on average{without or ' of all'}")
    if figures["images_per_s"]:
        parts.append(f"{figures['images_per_s']:,.0f} images/s{without or _speed_after_warm_up(analysis)}")
    if figures["test_accuracy"] is not None:
        parts.append(f"test accuracy {figures['test_accuracy']:.2%}")
    return f"{', '.join(parts)}." if parts else ""


def _after_warm_up(analysis: Analysis) -> str:
    """Return the steps left out of the means."""
    cold = analysis.cold_steps
    return f" without the first{f' {cold}' if cold > 1 else ''}" if cold else ""


def _speed_after_warm_up(analysis: Analysis) -> str:
    """Return the steps left out of the speed, for a file without separate first steps."""
    return f" without the first {WARM_UP_STEPS}" if (analysis.all_steps or 0) > WARM_UP_STEPS else ""


def sharing(analysis: Analysis) -> str:
    """Return the time of synchronisation and its parts."""
    if not analysis.reducing["seconds"]:
        return "No gradients were reduced."
    a_step = analysis.per_step(analysis.sync_s)
    share = analysis.sync_share
    begin = f"Synchronisation took {_ms(analysis.sync_s)} in all" if share is None else (
        f"Synchronisation took {share:.1%} of a step" + (f", {_ms(a_step)}" if a_step is not None else "")
    )  # fmt: skip
    whole = analysis.sync_s or 1.0
    packing = analysis.sync["pack_s"] + analysis.sync["unpack_s"]
    moving = "compressing, moving and adding data" if analysis.compressed else "moving and adding data"
    parts = [
        (analysis.sync["wait_s"], "waiting for other ranks"),
        (analysis.reducing["transfer_s"] if analysis.several else 0.0, moving),
        (analysis.sync["transfer_s"] - analysis.reducing["transfer_s"] if analysis.several else 0.0, "checks"),
        (analysis.sync["wait_unknown_s"], "waiting or moving, not known which"),
        (packing, "packing and unpacking"),
    ]
    words = [f"{seconds / whole:.0%} {what}" for seconds, what in parts if seconds > 0.005 * whole]
    if len(words) < 2:
        return f"{begin}."
    uneven = "" if analysis.sync["wait_s"] < _MOSTLY * whole else (
        " Ranks that arrive at different times cost more than moving the data."
    )  # fmt: skip
    return f"{begin}: {', '.join(words)}.{uneven}"


def arrivals(analysis: Analysis) -> str:
    """Return the rank that others wait for, or that there is none."""
    rows, ranks = analysis.counts["stragglers"], analysis.run.world_size
    seen = sum(row["last"] for row in rows)
    if not rows or ranks < 2:
        return ""
    worst = max(rows, key=lambda row: (row["share"], -row["rank"]))
    if worst["share"] * ranks >= _STANDS_OUT and worst["last"] >= _LEAST_SEEN:
        return (
            f"Rank {worst['rank']} arrived last in {worst['share']:.0%} of {seen:,} collectives, on average "
            f"{_ms(worst['mean_late_s'])} after the second-to-last rank, at most {_ms(worst['max_late_s'])}."
        )
    late_s = sum(row["late_s"] for row in rows) / max(1, seen)
    return f"No rank stands out: the last one arrived on average {_ms(late_s)} after the second-to-last."


def detour(analysis: Analysis) -> str:
    """Return a hint if gradients went through MPI on request although shared memory is available."""
    asked = (analysis.run.figures["settings"] or {}).get("transport")
    hosts = {record["host"] for record in analysis.run.ranks}
    if not analysis.several or len(hosts) > 1 or analysis.reductions["transport"] != "mpi" or asked != "mpi":
        return ""
    return "All ranks are on one host, and gradients went through MPI: --transport shared reduces them in its memory."


def overlap(analysis: Analysis) -> str:
    """Return the share of communication that was hidden behind computing."""
    hidden, whole = analysis.reducing["hidden_s"], analysis.reducing["seconds"]
    if hidden <= 0 or not analysis.several:
        return ""
    return f"{hidden / whole:.0%} of communication was hidden behind computing, {1 - hidden / whole:.0%} was exposed."


def advice(analysis: Analysis) -> str:
    """Return whether another bucket size is predicted to be faster."""
    if analysis.advice is None or analysis.costs is None:
        return ""
    best, cost = analysis.advice.recommendation.best, analysis.costs.cost
    alpha, beta = written(cost.alpha_s, "time"), written(cost.beta_s_per_byte, "time_per_kib")
    price = f"Moving costs {alpha} a call and {beta} a KiB"
    buckets = count(analysis.advice.current_buckets, "bucket")
    if analysis.advice.is_good:
        return f"{price}: this run's {buckets} a step are as good as any."
    size = "no bucketing" if best.bucket_size is None else f"--bucket-size {format_size(best.bucket_size)}"
    return (
        f"{price}: {size.replace(' KiB', 'KiB').replace(' MiB', 'MiB')} should take {_ms(best.seconds)} a step "
        f"instead of {_ms(analysis.advice.current_s)} with this run's {buckets}."
    )


def start(analysis: Analysis) -> str:
    """Return how long the slowest rank took from its process's start to the end of its first step."""
    starts = [each for record in analysis.run.ranks if "first_step" in (each := record["start_s"] or {})]
    if not starts:
        return ""
    slowest = max(starts, key=lambda parts: sum(parts.values()))
    parts = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f} s" for name, seconds in slowest.items())
    return f"The first step was complete {sum(slowest.values()):.2f} s after the start: {parts}."


def upkeep(analysis: Analysis) -> str:
    """Return the result of the replica checks and the cost of measuring."""
    parts = []
    checks = max((record["replica_checks"] or 0 for record in analysis.run.ranks), default=0)
    if checks and not any(record["replica_mismatches"] for record in analysis.run.ranks):
        parts.append(f"Replicas were compared {count(checks, 'time')} and were equal.")
    seconds = analysis.counts["stats_overhead"]["seconds"]
    if analysis.all_training_s:
        parts.append(f"Measuring cost {seconds / analysis.all_training_s:.2%} of the time.")
    return " ".join(parts)
