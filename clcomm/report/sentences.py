"""A run in words: the sentences that come first in every report."""

from __future__ import annotations

from typing import NamedTuple

from clcomm.report.causes import causes
from clcomm.report.facts import Facts
from clcomm.report.shapes import count, written
from clcomm.report.shapes import milliseconds as _ms
from clcomm.units import format_size

#: A rank stands out when it came last so many times as often as an even share, and the calls were not just a few.
_STANDS_OUT, _LEAST_SEEN = 1.5, 10
#: The share of synchronising from which on it mostly is waiting.
_MOSTLY = 0.75
#: Steps that `images_per_s` leaves out at the start of a run that has more; docs/reports.md.
WARM_UP_STEPS = 10


def title(facts: Facts) -> str:
    """Return what ran, as a title."""
    figures = facts.run.figures
    what = " on ".join(figures[name] for name in ("model", "dataset") if figures[name])
    hosts = f" of {figures['hosts']} hosts" if (figures["hosts"] or 1) > 1 else ""
    return f"{what or 'A run'}, {count(facts.run.world_size, 'rank')}{hosts}"


class Tile(NamedTuple):
    """A figure to be read from afar, and what it is."""

    value: str
    caption: str


def tiles(facts: Facts) -> list[Tile]:
    """Return the few figures that sum a run up."""
    figures, step_s = facts.run.figures, facts.per_step(facts.training_s)
    found = []
    if figures["images_per_s"]:
        found.append(Tile(f"{figures['images_per_s']:,.0f}", f"images/s{_after_warm_up(facts)}"))
    if step_s is not None:
        found.append(Tile(_ms(step_s), "a mean step of all"))
    if facts.sync_share is not None:
        found.append(Tile(f"{facts.sync_share:.1%}", "of it synchronising"))
    if figures["test_accuracy"] is not None:
        found.append(Tile(f"{figures['test_accuracy']:.2%}", "test accuracy"))
    return found


def headline(facts: Facts) -> list[str]:
    """Return what a reader should know first, most important first."""
    found = causes(facts)
    why = [cause.sentence for cause in found]
    last = "" if any(cause.rank >= 0 for cause in found) else arrivals(facts)
    lines = [*problems(facts), pace(facts), *why, sharing(facts), last, detour(facts), overlap(facts), advice(facts)]
    return [line for line in [*lines, upkeep(facts)] if line]


def problems(facts: Facts) -> list[str]:
    """Return what is wrong: missing files, failures, differing replicas."""
    found = []
    missing = facts.run.world_size - len(facts.run.ranks)
    if missing:
        there = {record["rank"] for record in facts.run.ranks}
        names = [str(rank) for rank in range(facts.run.world_size) if rank not in there]
        found.append(
            f"{count(missing, 'rank')} of {facts.run.world_size} missing here: {', '.join(names[:10])}"
            f"{', ...' if missing > 10 else ''}; all figures are of the others."
        )
    failed = sum(row["failures"] for row in facts.counts["operations"])
    if failed:
        found.append(f"{count(failed, 'call')} failed.")
    mismatches = max((record["replica_mismatches"] or 0 for record in facts.run.ranks), default=0)
    if mismatches:
        found.append(f"The replicas differed {count(mismatches, 'time')}: do not trust what they learned.")
    return found


def pace(facts: Facts) -> str:
    """Return how fast it went."""
    figures, parts = facts.run.figures, []
    if facts.steps:
        parts.append(f"{count(round(facts.steps), 'step')}")
    step_s = facts.per_step(facts.training_s)
    if step_s is not None:
        parts.append(f"{_ms(step_s)} each on average of all")
    if figures["images_per_s"]:
        parts.append(f"{figures['images_per_s']:,.0f} images/s{_after_warm_up(facts)}")
    if figures["test_accuracy"] is not None:
        parts.append(f"test accuracy {figures['test_accuracy']:.2%}")
    return f"{', '.join(parts)}." if parts else ""


def _after_warm_up(facts: Facts) -> str:
    """Say which steps the speed leaves out, for the mean step has them all."""
    return f" without the first {WARM_UP_STEPS}" if (facts.steps or 0) > WARM_UP_STEPS else ""


def sharing(facts: Facts) -> str:
    """Return what synchronising took, and what went into it."""
    if not facts.reducing["seconds"]:
        return "No gradients were reduced."
    a_step = facts.per_step(facts.sync_s)
    share = facts.sync_share
    begin = f"Synchronisation took {_ms(facts.sync_s)} in all" if share is None else (
        f"Synchronisation took {share:.1%} of a step" + (f", {_ms(a_step)}" if a_step is not None else "")
    )  # fmt: skip
    whole = facts.sync_s or 1.0
    packing = facts.sync["pack_s"] + facts.sync["unpack_s"]
    moving = "compressing, moving and adding data" if facts.compressed else "moving and adding data"
    parts = [
        (facts.sync["wait_s"], "waiting for other ranks"),
        (facts.reducing["transfer_s"] if facts.several else 0.0, moving),
        (facts.sync["transfer_s"] - facts.reducing["transfer_s"] if facts.several else 0.0, "checks"),
        (facts.sync["untold_s"], "waiting or moving, it is not told which"),
        (packing, "packing and unpacking"),
    ]
    words = [f"{seconds / whole:.0%} {what}" for seconds, what in parts if seconds > 0.005 * whole]
    if len(words) < 2:
        return f"{begin}."
    uneven = "" if facts.sync["wait_s"] < _MOSTLY * whole else (
        " What makes ranks arrive apart costs more than moving the data."
    )  # fmt: skip
    return f"{begin}: {', '.join(words)}.{uneven}"


def arrivals(facts: Facts) -> str:
    """Return which rank the others wait for, if there is one."""
    rows, ranks = facts.counts["stragglers"], facts.run.world_size
    seen = sum(row["last"] for row in rows)
    if not rows or ranks < 2:
        return ""
    worst = max(rows, key=lambda row: (row["share"], -row["rank"]))
    if worst["share"] * ranks >= _STANDS_OUT and worst["last"] >= _LEAST_SEEN:
        return (
            f"Rank {worst['rank']} came last in {worst['share']:.0%} of {seen:,} collectives, "
            f"{_ms(worst['mean_late_s'])} after the one before it on average and {_ms(worst['max_late_s'])} at most."
        )
    late_s = sum(row["late_s"] for row in rows) / max(1, seen)
    return f"No rank stands out: the last one came {_ms(late_s)} after the one before it on average."


def detour(facts: Facts) -> str:
    """Return that gradients go through MPI where shared memory would do."""
    asked = (facts.run.figures["settings"] or {}).get("transport")
    hosts = {record["host"] for record in facts.run.ranks}
    if not facts.several or len(hosts) > 1 or facts.reductions["transport"] != "mpi" or asked != "mpi":
        return ""
    return "All ranks are on one host, and gradients went through MPI: --transport shared reduces them in its memory."


def overlap(facts: Facts) -> str:
    """Return how much of communication was hidden behind computing."""
    hidden, whole = facts.reducing["hidden_s"], facts.reducing["seconds"]
    if hidden <= 0 or not facts.several:
        return ""
    return f"{hidden / whole:.0%} of communication was hidden behind computing, {1 - hidden / whole:.0%} was exposed."


def advice(facts: Facts) -> str:
    """Return whether another bucket size promises more."""
    if facts.advice is None or facts.costs is None:
        return ""
    best, cost = facts.advice.recommendation.best, facts.costs.cost
    alpha, beta = written(cost.alpha_s, "time"), written(cost.beta_s_per_byte, "time_per_kib")
    price = f"Moving costs {alpha} a call and {beta} a KiB"
    buckets = count(facts.advice.current_buckets, "bucket")
    if facts.advice.is_good:
        return f"{price}: this run's {buckets} a step are as good as any."
    size = "no bucketing" if best.bucket_size is None else f"--bucket-size {format_size(best.bucket_size)}"
    return (
        f"{price}: {size.replace(' KiB', 'KiB').replace(' MiB', 'MiB')} should take {_ms(best.seconds)} a step "
        f"instead of {_ms(facts.advice.current_s)} with this run's {buckets}."
    )


def upkeep(facts: Facts) -> str:
    """Return what the checks found and what measuring took."""
    parts = []
    checks = max((record["replica_checks"] or 0 for record in facts.run.ranks), default=0)
    if checks and not any(record["replica_mismatches"] for record in facts.run.ranks):
        parts.append(f"Replicas were compared {count(checks, 'time')} and were alike.")
    seconds = facts.counts["stats_overhead"]["seconds"]
    if facts.training_s:
        parts.append(f"Keeping these figures took {seconds / facts.training_s:.3%} of the steps' time.")
    return " ".join(parts)
