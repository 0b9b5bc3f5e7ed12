"""A run's figures as a report's sections need them: sums, means and shares, each worked out in one place."""

from __future__ import annotations

from typing import Any

from clcomm.agreement import CHECKS
from clcomm.auto_buckets import TUNING
from clcomm.report import costs
from clcomm.report.reading import Run
from clcomm.stats import CommStats
from clcomm.synchronizer import GRADIENTS, PARAMETERS

#: The parts of a reduction's time, one after the other.
PART_KEYS = ("pack_s", "wait_s", "transfer_s", "unpack_s")
#: What ranks say to each other in steps beside their gradients: whose count how much, whether replicas are alike.
_CHECKING = (CHECKS, TUNING)


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
        self.reducing, self.checking = reducing(self.stats), checking(self.stats)
        self.sync = synchronisation(self.stats)
        self.tells_waiting = self.reducing["wait_s"] > 0
        self.phases = {row["phase"]: row["seconds"] for row in self.counts["phases"] if not row["label"]}
        self.ceiling = costs.ceiling_of(run.figures["ceilings"], self.reductions["transport"])
        self.own_costs = costs.own_costs(self.buckets)
        self.costs = self.own_costs if isinstance(self.own_costs, costs.Costs) else self.stored_costs()
        layout = [bucket for bucket in run.figures["layout"] or [] if bucket]
        self.layout = layout
        is_told = self.costs and layout and not costs.unfit(self.buckets)
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
    others = checking(stats)
    return {name: seconds + others[name] for name, seconds in reducing(stats).items() if name in others}


def reducing(stats: CommStats) -> dict[str, float]:
    """Return the time parts of reductions of gradients and of a sharded update's all-gathers of parameters.

    `in_update_s` is what of it a sharded update does in the optimizer's step.
    """
    in_update = (("reduce_scatter", GRADIENTS), ("all_gather", PARAMETERS))
    rows = [
        row
        for row in stats.as_dict()["operations"]
        if row["label"] == GRADIENTS or (row["operation"], row["label"]) in in_update
    ]
    updating = sum(row["seconds"] for row in rows if (row["operation"], row["label"]) in in_update)
    return _summed(rows) | {"in_update_s": updating}


def checking(stats: CommStats) -> dict[str, float]:
    """Return the time parts of what ranks agree on in steps; the few such calls before the first step are in it too."""
    return _summed([row for row in stats.as_dict()["operations"] if row["label"] in _CHECKING])


def _summed(rows: list[dict[str, Any]]) -> dict[str, float]:
    names = (*PART_KEYS, "exposed_s", "hidden_s", "seconds")
    return {name: sum(row[name] for row in rows) for name in names}


def step_parts(facts: Facts) -> list[tuple[str, float]]:
    """Return the parts of a mean step in seconds, in the order in which they happen; empty where it is not known."""
    if not facts.training_s or not facts.steps:
        return []
    reducing = facts.reducing
    if reducing["hidden_s"]:
        moving = [("exposed communication", reducing["exposed_s"])]
    elif facts.tells_waiting:
        moving = [("wait for ranks", reducing["wait_s"]), ("move and add", reducing["transfer_s"])]
    else:
        moving = [("communication", reducing["seconds"])]
    updating = facts.phases.get("optimizer", 0.0) - reducing["in_update_s"] - _norms_s(facts)
    known = [
        ("wait for data", facts.data_wait_s or 0.0),
        ("forward and backward", facts.phases.get("forward_backward", 0.0)),
        ("checks and join", facts.checking["exposed_s"]),
        ("pack", reducing["pack_s"]),
        *moving,
        ("unpack", reducing["unpack_s"]),
        ("optimizer", max(0.0, updating)),
    ]
    rest = facts.training_s - sum(seconds for _, seconds in known)
    name = "the rest" if facts.phases.get("forward_backward") else "computing and the rest"
    return [(what, seconds / facts.steps) for what, seconds in [*known, (name, max(0.0, rest))] if seconds > 0]


def _norms_s(facts: Facts) -> float:
    """Return what clipping spends on adding up the ranks' norms: of the checks, those in the optimizer's phase."""
    if (facts.run.figures["settings"] or {}).get("clip_norm", "-") == "-":
        return 0.0
    gathers = facts.stats.total("all_gather", CHECKS)
    return gathers["mean_s"] * min(gathers["calls"], facts.steps or 0)


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
