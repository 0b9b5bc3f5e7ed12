"""The parts of a step in seconds; each second counts once, so that they add up to the step."""

from __future__ import annotations

from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.events import Row
from clcomm.insight.report.documents import Record
from clcomm.sync.agreement import CHECKS
from clcomm.sync.clipping import CLIPPING
from clcomm.sync.decision import TUNING
from clcomm.sync.synchronizer import GRADIENTS, PARAMETERS

#: The parts of a reduction's time; wait_unknown is waiting or moving where the transport does not report which.
PART_KEYS = ("pack_s", "wait_s", "transfer_s", "wait_unknown_s", "unpack_s")


#: Names of parts, the same in every table and chart.
DATA, COMPUTING, DEVICE = "wait for data", "forward and backward", "wait for the device"


OPTIMIZER = "optimizer"


PACK, WAIT, EITHER, UNPACK, HIDDEN = "pack", "wait for ranks", "wait or move", "unpack", "hidden"


CORE, REST, COMPUTING_TOO = "wait for a core", "the rest", "computing and the rest"


#: The phases that make up a step, where none is named "step".
_PHASES = ("forward_backward", "sync", "loss", CLIPPING, "optimizer")


#: Phases in which time without a core is counted; in the others a rank polls for the others' arrival.
_WAITING = ("data", "forward_backward", "loss", CLIPPING, "optimizer")


#: A rank comes last often if it does so at least this many times as often as its even share.
OFTEN = 1.5


#: Labels of other collectives within steps, and the names of their parts.
OTHER_LABELS = {CHECKS: "checks and join", TUNING: "trying bucket sizes"}


def moving(several: bool, compressed: bool) -> str:
    """Return the name of the part that moves data."""
    if not several:
        return "communication"
    return "compress, move and add" if compressed else "move and add"


def parts_of(record: Record, stats: CommStats, moving: str, last: float = 0.0) -> dict[str, float]:
    """Return the parts of all of a rank's steps by name, in the order in which they occur; {} if steps were not timed.

    Args:
        record, stats: the rank's.
        moving: name of the part that moves data.
        last: share of collectives, 0 to 1, in which the others waited for this rank, if most did.
    """
    if not record["training_s"] or not record["steps"]:
        return {}
    own, core = own_phases(stats), core_waits(record, stats)
    sync, reduced, clipped = synchronisation(stats), reducing(stats), labelled(stats, CLIPPING)
    own = {name: seconds - core.get(name, 0.0) for name, seconds in own.items()}
    computes_apart = record["device_in_caller"] is False
    # A rank that comes last waits for no other: in a collective without a core it waits for that.
    held_up = last * min(sync["wait_s"], (record["core_waits_s"] or {}).get("sync", 0.0))
    known = {
        DATA: (record["data_wait_s"] or 0.0) - core.get("data", 0.0),
        COMPUTING: own.get("forward_backward", 0.0),
        **{part: labelled(stats, label)["transfer_s"] for label, part in OTHER_LABELS.items()},
        PACK: reduced["pack_s"],
        WAIT: sync["wait_s"] + clipped["wait_s"] - held_up,
        moving: reduced["transfer_s"],
        EITHER: sync["wait_unknown_s"] + clipped["wait_unknown_s"],
        UNPACK: reduced["unpack_s"],
        DEVICE: own.get("sync", 0.0) + own.get("loss", 0.0) if computes_apart else 0.0,
        CLIPPING: own.get(CLIPPING, 0.0) + clipped["transfer_s"],
        OPTIMIZER: own.get("optimizer", 0.0),
        CORE: sum(core.values()) + held_up,
    }
    known = {name: max(0.0, seconds) for name, seconds in known.items()}
    rest = record["training_s"] - sum(known.values())
    return {**known, REST if "forward_backward" in own else COMPUTING_TOO: max(0.0, rest)}


def core_waits(record: Record, stats: CommStats) -> dict[str, float]:
    """Return how long a rank was ready to run without a core, by phase; {} where Linux did not report it.

    In the optimizer a rank may wait for others, as clipping does, and polling counts as waiting for a core; the share
    of the phase that was communication is left out. In backward no rank waits for another.
    """
    waits = record["core_waits_s"] or {}
    rows = {row["phase"]: row for row in stats.as_dict()["phases"] if not row["label"]}
    found = {}
    for name in _WAITING:
        row = rows.get(name)
        if row is not None and row["seconds"] and name in waits:
            own_s = row["seconds"] - row["communication_s"]
            found[name] = min(own_s, waits[name] * (own_s / row["seconds"] if name == "optimizer" else 1.0))
    return found


def own_phases(stats: CommStats) -> dict[str, float]:
    """Return the seconds of an average rank's phases without communication."""
    rows = stats.as_dict()["phases"]
    return {row["phase"]: row["seconds"] - row["communication_s"] for row in rows if not row["label"]}


def synchronisation(stats: CommStats) -> dict[str, float]:
    """Return the time parts of keeping the replicas equal: reducing and checking."""
    parts = [reducing(stats), *(labelled(stats, label) for label in OTHER_LABELS)]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def reducing(stats: CommStats) -> dict[str, float]:
    """Return the time parts of reductions of gradients and of a sharded update's all-gathers of parameters."""
    rows = stats.as_dict()["operations"]
    gathers = ("all_gather", PARAMETERS)
    return _summed([row for row in rows if row["label"] == GRADIENTS or (row["operation"], row["label"]) == gathers])


def labelled(stats: CommStats, label: str) -> dict[str, float]:
    """Return the time parts of a label's calls in steps."""
    parts = _summed([row for row in stats.as_dict()["operations"] if row["label"] == label])
    share = _share_in_steps(stats, parts["seconds"]) if label == CHECKS else 1.0
    return {name: share * seconds for name, seconds in parts.items()}


def _share_in_steps(stats: CommStats, checks_s: float) -> float:
    """Return the share of all checks within steps' phases; those before the first step wait for start-up.

    It exceeds 1 if steps contain barriers too, as clipping does.
    """
    phases = {row["phase"]: row["communication_s"] for row in stats.as_dict()["phases"] if not row["label"]}
    if "sync" not in phases or not checks_s:
        return 1.0
    reduced = reducing(stats)
    others = reduced["exposed_s"] + reduced["pack_s"] + reduced["unpack_s"]
    others += sum(labelled(stats, label)["seconds"] for label in (TUNING, CLIPPING))
    return float(max(0.0, sum(phases.get(name, 0.0) for name in _PHASES) - others) / checks_s)


def _summed(rows: list[Row]) -> dict[str, float]:
    names = (*PART_KEYS, "exposed_s", "hidden_s", "seconds")
    return {name: sum(row[name] for row in rows) for name in names}
