"""A run's figures as a report's sections need them: sums, means and shares, each worked out in one place."""

from __future__ import annotations

from typing import Any

from clcomm.agreement import CHECKS
from clcomm.auto_buckets import TUNING
from clcomm.report import costs
from clcomm.report.reading import Run
from clcomm.stats import MOST_TALLIES, CommStats
from clcomm.synchronizer import GRADIENTS, PARAMETERS

#: The parts of a reduction's time; untold is what is waiting or moving, and the transport does not tell which.
PART_KEYS = ("pack_s", "wait_s", "transfer_s", "untold_s", "unpack_s")
#: The phases that make up a step.
_PHASES = ("forward_backward", "sync", "loss", "optimizer")
#: Labels of what ranks say to each other in steps beside their gradients, and what that is as a part of a step.
_BESIDE = {CHECKS: "checks and join", TUNING: "trying bucket sizes"}


class Facts:
    """A run's figures as the sections need them, worked out once. A mean rank's, where nothing else is said."""

    def __init__(self, run: Run):
        self.run = run
        self.stats = run.stats()
        self.counts = self.stats.as_dict()
        self.by_rank = [(record, run.stats([record])) for record in run.ranks]
        self.buckets = [row for row in self.counts["buckets"] if row["label"] == GRADIENTS]
        self.reductions = self.stats.total("all_reduce", GRADIENTS)
        self.steps = self._mean("steps")
        self.training_s = self._mean("training_s")
        self.data_wait_s = self._mean("data_wait_s")
        self.reducing = reducing(self.stats)
        self.sync = synchronisation(self.stats)
        self.several = run.world_size > 1
        self.compressed = any(row["wire_bytes"] != row["bytes"] for row in self.counts["operations"])
        self.moving = "compress, move and add" if self.compressed else "move and add"
        self.overflows = len(self.stats.tallies) >= MOST_TALLIES
        self.phases = {
            row["phase"]: row["seconds"] - row["communication_s"] for row in self.counts["phases"] if not row["label"]
        }  # without what they communicated
        self.sums = run.ranks[0]["sums"]
        ceiling = costs.ceiling_of(run.figures["ceilings"], self.reductions["transport"], self.sums)
        self.ceiling = ceiling if isinstance(ceiling, costs.Cost) else None
        self.no_ceiling = ceiling or "no such calls were measured on rank 0's host before"
        self.own_costs = costs.own_costs(self.buckets)
        self.costs = self.own_costs if isinstance(self.own_costs, costs.Costs) else self.stored_costs()
        layout = [bucket for bucket in run.figures["layout"] or [] if bucket]
        self.layout = layout
        is_told = self.costs and layout and self.buckets and not costs.unfit(self.buckets)
        self.advice = costs.advise(self.costs, layout) if self.costs and is_told else None

    def _mean(self, name: str) -> float | None:
        values = [record[name] for record in self.run.ranks]
        return None if None in values else sum(values) / len(values)

    def stored_costs(self) -> costs.Costs | None:
        return costs.Costs(self.ceiling, "measured by `clcomm tune` on this host") if self.ceiling else None

    @property
    def sync_s(self) -> float:
        """What synchronising the replicas took of the run's time."""
        return self.sync["pack_s"] + self.sync["exposed_s"] + self.sync["unpack_s"]

    @property
    def sync_share(self) -> float | None:
        return self.sync_s / self.training_s if self.training_s else None

    def per_step(self, seconds: float | None) -> float | None:
        return seconds / self.steps if self.steps and seconds is not None else None


def synchronisation(stats: CommStats) -> dict[str, float]:
    """Return the time parts of all that keeps replicas alike: reducing and checking."""
    parts = [reducing(stats), *(beside(stats, label) for label in _BESIDE)]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def reducing(stats: CommStats) -> dict[str, float]:
    """Return the time parts of reductions of gradients and of a sharded update's all-gathers of parameters."""
    rows = stats.as_dict()["operations"]
    gathers = ("all_gather", PARAMETERS)
    return _summed([row for row in rows if row["label"] == GRADIENTS or (row["operation"], row["label"]) == gathers])


def beside(stats: CommStats, label: str) -> dict[str, float]:
    """Return the time parts of a label's calls in steps."""
    parts = _summed([row for row in stats.as_dict()["operations"] if row["label"] == label])
    share = _share_in_steps(stats, parts["seconds"]) if label == CHECKS else 1.0
    return {name: share * seconds for name, seconds in parts.items()}


def _share_in_steps(stats: CommStats, checks_s: float) -> float:
    """Return what steps' phases account for beside reducing over all checks, some of which come before the first step.

    Those wait for whoever starts late. More than 1 where steps hold barriers as well, as clipping does.
    """
    phases = {row["phase"]: row["communication_s"] for row in stats.as_dict()["phases"] if not row["label"]}
    if "sync" not in phases or not checks_s:
        return 1.0
    reduced, tuned = reducing(stats), beside(stats, TUNING)["seconds"]
    others = reduced["exposed_s"] + reduced["pack_s"] + reduced["unpack_s"] + tuned
    return max(0.0, sum(phases.get(name, 0.0) for name in _PHASES) - others) / checks_s


def _summed(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = (*PART_KEYS, "exposed_s", "hidden_s", "seconds")
    return {name: sum(row[name] for row in rows) for name in names}


def step_parts(facts: Facts) -> list[tuple[str, float]]:
    """Return the parts of a mean step in seconds, in the order in which they happen; empty where it is not known."""
    if not facts.training_s or not facts.steps:
        return []
    reducing = facts.reducing
    moving = [
        ("wait for ranks", reducing["wait_s"]),
        (facts.moving if facts.several else "communication", reducing["transfer_s"]),
        ("exposed communication" if reducing["hidden_s"] else "communication", reducing["untold_s"]),
    ]
    known = [
        ("wait for data", facts.data_wait_s or 0.0),
        ("forward and backward", facts.phases.get("forward_backward", 0.0)),
        *((part, beside(facts.stats, label)["exposed_s"]) for label, part in _BESIDE.items()),
        ("pack", reducing["pack_s"]),
        *moving,
        ("unpack", reducing["unpack_s"]),
        ("wait for the device", _device_s(facts)),
        ("optimizer", facts.phases.get("optimizer", 0.0)),
    ]
    rest = facts.training_s - sum(seconds for _, seconds in known)
    name = "the rest" if facts.phases.get("forward_backward") else "computing and the rest"
    return [(what, seconds / facts.steps) for what, seconds in [*known, (name, max(0.0, rest))] if seconds > 0]


def _device_s(facts: Facts) -> float:
    """Return what `sync`, without its communication, and reading the loss take where a device computes by itself."""
    computes_apart = any(record["device_in_caller"] is False for record in facts.run.ranks)
    return sum(facts.phases.get(name, 0.0) for name in ("sync", "loss")) if computes_apart else 0.0


def rank_rows(facts: Facts) -> list[dict[str, Any]]:
    """Return a row for each rank."""
    late = {row["rank"]: row for row in facts.counts["stragglers"]}
    rows = []
    for record, stats in facts.by_rank:
        sync, steps = synchronisation(stats), record["steps"]
        parts = {f"{name.removesuffix('_s')}_step_s": value / steps if steps else None for name, value in sync.items()}
        step_s = record["training_s"] / steps if steps and record["training_s"] is not None else None
        came = late.get(record["rank"], {"last": 0, "share": 0.0, "mean_late_s": None})
        rows.append({
            "rank": record["rank"], "host_name": record["host_name"], "steps": steps, "step_s": step_s, **parts,
            "last": came["last"] if late else None, "last_share": came["share"] if late else None,
            "mean_late_s": came["mean_late_s"], "failures": sum(t.failures for t in stats.tallies.values()),
            "peak_rss_bytes": record["peak_rss_bytes"], "device_peak_bytes": record["device_peak_bytes"],
        })  # fmt: skip
    return rows


def per_call(row: dict[str, Any]) -> dict[str, Any]:
    """Return a bucket's row with the parts of a mean call, whose names end in mean_s, beside the totals."""
    calls = row["calls"] or 1
    return {**row, **{f"{name[:-2]}_mean_s": row[name] / calls for name in (*PART_KEYS, "hidden_s")}}
