"""CommStats: an observer that counts calls, bytes and time of every collective.

Bandwidths follow nccl-tests' definitions (its doc/PERFORMANCE.md): algbw is the size of an operation over its time,
busbw is algbw times the share of that size which has to cross each rank's link. Times are summed as whole nanoseconds:
integers add up to the same whatever their order, so ranks' stats merge exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.comm.stats.events import Collective, Observer, Phase, Row
from clcomm.comm.stats.steps import DATA, STEP, Steps
from clcomm.comm.stats.tally import Fields, Histogram, Tally, to_ns

if TYPE_CHECKING:
    from clcomm.base.console.table import TextTable

__all__ = ["Collective", "CommStats", "Histogram", "Observer", "Phase", "bus_factor"]

SCHEMA = 4
#: The most combinations of operation, label and bucket, and the most phases, with separate counts; later combinations
#: share the counts of their label or operation.
MOST_TALLIES, MOST_PHASES = 256, 1024
OTHER_LABELS = "(other labels)"
#: Labels of the collectives that count for `stragglers`: gradients, and those without a label. In others ranks may wait
#: for what one rank does alone, such as a slow import.
STEPPED = ("gradients", "")
#: Number of events that are counted together: after a training step this code is no longer in the processor's caches,
#: and counting a single event takes ten times as long as counting one of a batch.
BATCH = 512


def bus_factor(operation: str, world_size: int) -> float:
    """Return busbw / algbw of an operation: the share of its size that crosses each rank's link (nccl-tests)."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    if operation in ("all_gather", "reduce_scatter", "gather", "scatter"):
        return (world_size - 1) / world_size
    return 1.0


#: Operation, label, bucket, and the part of the Communicator ("": all of it).
Key = tuple[str, str, int, str]
#: Phase, label, bucket.
PhaseKey = tuple[str, str, int]


class CommStats:
    """Counts of every operation of one Communicator since the last reset, and of the phases around them.

    Memory is bounded by MOST_TALLIES and MOST_PHASES, whatever the number of calls. `name` is the Communicator's.
    """

    def __init__(self, world_size: int = 1, name: str = ""):
        self.world_size, self.name = world_size, name
        self.ranks = 1
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero, e.g. at the start of an epoch."""
        self.tallies: dict[Key, Tally] = {}
        self.phases: dict[
            PhaseKey, list[int]
        ] = {}  # (name, label, bucket): calls, ns, ns of that communicating, longest ns
        self.late: dict[int, list[int]] = {}  # rank: times it was last, ns after the rank before it, most ns
        self.events = self.counting_ns = 0
        self.steps = Steps()
        self._all_reduces_before = 0, 0  # calls and bytes, up to the last `restart_all_reduces`
        self._uncounted: list[Collective] = []
        self._uncounted_phases: list[Phase] = []

    # --- counting: this runs at every collective ---

    def collective_finished(self, event: Collective) -> None:
        self._uncounted.append(event)
        if len(self._uncounted) >= BATCH:
            self.flush()

    def phase_finished(self, phase: Phase) -> None:
        self._uncounted_phases.append(phase)
        if len(self._uncounted_phases) >= BATCH:
            self.flush()
        if phase[0] in (STEP, DATA):
            self.steps.add(phase, self.state)

    def flush(self) -> None:
        """Count the events of the current batch; call it before reading `tallies`, `phases` or `late`."""
        if not (self._uncounted or self._uncounted_phases):
            return
        began_ns = thread_time_ns()
        events, self._uncounted = self._uncounted, []
        phases, self._uncounted_phases = self._uncounted_phases, []
        self._count_phases(phases)
        if events:
            self._count_all(events)
        self.events += len(events) + len(phases)
        self.counting_ns += thread_time_ns() - began_ns

    def _count_all(self, events: list[Collective]) -> None:
        fields = tuple(zip(*events, strict=True))
        keyed = fields[0], fields[1], fields[8], fields[17]
        if all(values.count(values[0]) == len(events) for values in keyed):  # one prepared call again and again
            self._count((keyed[0][0], keyed[1][0], keyed[2][0], keyed[3][0]), fields)
            return
        keys = tuple(zip(*keyed, strict=True))
        alike: dict[Key, list[Collective]] = {}
        for key, event in zip(keys, events, strict=True):
            if key in alike:
                alike[key].append(event)
            else:
                alike[key] = [event]
        for key, each in alike.items():
            self._count(key, tuple(zip(*each, strict=True)))

    def _count(self, key: Key, fields: Fields) -> None:
        tally = self.tallies.get(key)
        if tally is None:
            tally = self._new_tally(*key, fields[4][0])
            tally.ranks = fields[18][0]
        tally.add(fields)
        if key[1] in STEPPED:
            self._count_late(fields[2], fields[12], fields[13])

    def _count_late(self, sizes: Sequence[int], last: Sequence[int], late_s: Sequence[float]) -> None:
        ranks, late_ns = np.array(last), to_ns(late_s)
        if 0 in sizes:  # barriers and objects have no bytes
            ranks[np.array(sizes) == 0] = -1
        for rank in {*ranks.tolist()} - {-1}:
            mine = late_ns[ranks == rank]
            counts = self.late.setdefault(rank, [0, 0, 0])
            counts[0] += len(mine)
            counts[1] += int(mine.sum())
            counts[2] = max(counts[2], int(mine.max()))

    def _new_tally(self, operation: str, label: str, bucket: int, part: str, transport: str) -> Tally:
        key = (operation, label, bucket, part)
        if len(self.tallies) >= MOST_TALLIES:
            whole = (operation, label, -1, part)
            key = whole if whole in self.tallies else (operation, OTHER_LABELS, -1, part)
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = Tally(transport)
        return tally

    def _count_phases(self, phases: list[Phase]) -> None:
        alike: dict[PhaseKey, list[tuple[float, float]]] = {}
        for name, _, seconds, label, bucket, communication_s, _ in phases:
            key = name, label, bucket
            if key in alike:
                alike[key].append((seconds, communication_s))
            else:
                alike[key] = [(seconds, communication_s)]
        for key, times in alike.items():
            if key not in self.phases and len(self.phases) >= MOST_PHASES:
                key = OTHER_LABELS, "", -1
            ns, within_ns = map(to_ns, zip(*times, strict=True))
            found = [len(times), int(ns.sum()), int(np.minimum(ns, within_ns).sum()), int(ns.max())]
            self.phases[key] = _merged(self.phases.get(key, [0, 0, 0, 0]), found)

    # --- reading ---

    @property
    def seconds(self) -> float:
        """Seconds of all operations together, as a mean over ranks."""
        self.flush()
        return sum(tally.ns for tally in self.tallies.values()) / 1e9 / self.ranks

    def merge_buckets(self, label: str) -> None:
        """Move the counts of a label's buckets to its count without a bucket, before it is split into other buckets."""
        self.flush()
        for key in [key for key in self.tallies if key[1] == label and key[2] >= 0]:
            operation, name, _, part = key
            self.tallies.setdefault((operation, name, -1, part), Tally()).absorb(self.tallies.pop(key))
        for phase, name, bucket in [key for key in self.phases if key[1] == label and key[2] >= 0]:
            counts = self.phases.pop((phase, name, bucket))
            whole = self.phases.get((phase, name, -1), [0] * len(counts))
            self.phases[phase, name, -1] = _merged(whole, counts)

    def total(self, operation: str, label: str | None = None) -> Row:
        """Return an operation's counts, for one label or (None) for all; zeros if it never ran."""
        self.flush()
        keys = [key for key in self.tallies if key[0] == operation and label in (None, key[1])]
        return self._row(operation, label or "", keys)

    def all_reduces(self, label: str | None = None) -> dict[str, float]:
        """Return LizarDist's figures of all-reduces: their number, their bytes, and the mean of these.

        label: of one label, since the last reset; None: of all, since the last `restart_all_reduces` too.
        """
        total, (calls, nbytes) = self.total("all_reduce", label), (0, 0) if label else self._all_reduces_before
        calls, nbytes = int(total["calls"]) - calls, int(total["bytes"]) - nbytes
        return {
            "total_allreduce_calls": calls,
            "total_bytes_sent": nbytes,
            "average_bytes_per_call": nbytes / max(1, calls),
        }

    def restart_all_reduces(self) -> None:
        """Let `all_reduces` of all labels count from 0; no other figure changes."""
        total = self.total("all_reduce")
        self._all_reduces_before = int(total["calls"]), int(total["bytes"])

    def as_dict(self) -> Row:
        """Return all counts as JSON-compatible values; docs/reports.md lists the fields."""
        self.flush()
        names = sorted({(key[0], key[1], key[3]) for key in self.tallies})
        buckets = [key for key in sorted(self.tallies) if key[2] >= 0]
        return {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "ranks_merged": self.ranks,
            "seconds": self.seconds,
            "operations": [self._row(*name[:2], self._keys_of(*name), name[2]) for name in names],
            "buckets": [{"bucket": key[2], **self._row(key[0], key[1], [key], key[3])} for key in buckets],
            "phases": self._phase_rows(),
            "stragglers": self._straggler_rows(),
            "stats_overhead": self._overhead(),
        }

    def _keys_of(self, operation: str, label: str, part: str) -> list[Key]:
        return [key for key in self.tallies if (key[0], key[1], key[3]) == (operation, label, part)]

    def _row(self, operation: str, label: str, keys: list[Key], part: str = "") -> Row:
        total = Tally()
        for key in keys:
            total.absorb(self.tallies[key])
        calls, nbytes = _mean(total.calls, self.ranks), _mean(total.nbytes, self.ranks)
        parts_ns = (total.ns, total.wait_ns, total.wait_unknown_ns, total.hidden_ns)
        seconds, wait_s, wait_unknown_s, hidden_s = (ns / 1e9 / self.ranks for ns in parts_ns)
        ranks = total.ranks or self.world_size
        moves = bool(nbytes and seconds) and ranks != 1
        algbw = nbytes / seconds if moves else None
        max_s = total.max_ns / 1e9
        percentiles = {f"p{p}_s": min(total.histogram.percentile(p / 100), max_s) for p in (50, 95, 99)}
        return {
            "operation": operation,
            "label": label,
            "part": part,
            "transport": total.transport,
            "calls": calls,
            "bytes": nbytes,
            "wire_bytes": _mean(total.wire_nbytes, self.ranks),
            "messages": total.messages / self.ranks,
            "message_bytes": total.message_nbytes / self.ranks,
            "average_bytes_per_call": nbytes / calls if calls else 0.0,
            "seconds": seconds,
            "mean_s": seconds / calls if calls else 0.0,
            "pack_s": self._phase_seconds("pack", keys),
            "wait_s": wait_s,
            "transfer_s": (total.ns - total.wait_ns - total.wait_unknown_ns - total.hidden_ns) / 1e9 / self.ranks,
            "wait_unknown_s": wait_unknown_s,
            "unpack_s": self._phase_seconds("unpack", keys),
            "exposed_s": seconds - hidden_s,
            "hidden_s": hidden_s,
            **percentiles,
            "max_s": max_s,
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * bus_factor(operation, ranks) if algbw and ranks > 0 else None,
            "failures": total.failures,
        }

    def _phase_seconds(self, phase: str, keys: Iterable[Key]) -> float:
        """Return the seconds of a phase of reductions with these labels and buckets, as a mean over ranks."""
        reductions = {(phase, key[1], key[2]) for key in keys if key[0] in ("all_reduce", "reduce_scatter")}
        return sum(self.phases[key][1] for key in reductions if key in self.phases) / 1e9 / self.ranks

    def _phase_rows(self) -> list[dict[str, object]]:
        merged: dict[tuple[str, str], list[int]] = {}
        for (name, label, _), counts in sorted(self.phases.items()):
            merged[name, label] = _merged(merged.get((name, label), [0, 0, 0, 0]), counts)
        return [
            {
                "phase": name, "label": label, "calls": _mean(calls, self.ranks), "seconds": ns / 1e9 / self.ranks,
                "communication_s": within_ns / 1e9 / self.ranks, "max_s": max_ns / 1e9,
            }
            for (name, label), (calls, ns, within_ns, max_ns) in merged.items()
        ]  # fmt: skip

    def _straggler_rows(self) -> list[dict[str, object]]:
        known = sum(counts[0] for counts in self.late.values())
        return [
            {
                "rank": rank, "last": _mean(last, self.ranks), "share": last / known, "late_s": ns / 1e9 / self.ranks,
                "mean_late_s": ns / 1e9 / last, "max_late_s": max_ns / 1e9,
            }
            for rank, (last, ns, max_ns) in sorted(self.late.items())
        ]  # fmt: skip

    def _overhead(self) -> dict[str, object]:
        seconds = self.counting_ns / 1e9 / self.ranks
        events = _mean(self.events, self.ranks)
        return {"events": events, "event_s": seconds / events if events else 0.0, "seconds": seconds}

    def table(self, title: str = "Communication", *, width: int | None = None) -> TextTable:
        """Return the counts as a table, most bytes first; times in ms, bandwidths in GB/s (10^9 bytes).

        `print` and Rich's consoles fit it to their width, or to `width` characters. Columns that do not fit are left
        out in a fixed order, and the last line names them. Numbers are never cut.
        """
        from clcomm.comm.stats.table import make_table  # here, as most programs need it once, at their end

        title = f"{title} on {self.name}" if self.name else title
        return make_table(self.as_dict()["operations"], self.ranks, title, width)

    # --- several ranks ---

    def state(self) -> Row:
        """Return the counts in JSON-compatible form, which `merged` takes; docs/reports.md lists the fields."""
        self.flush()
        return {
            "tallies": [
                {"operation": key[0], "label": key[1], "bucket": key[2], "part": key[3], **tally.state()}
                for key, tally in sorted(self.tallies.items())
            ],
            "phases": [[*key, *counts] for key, counts in sorted(self.phases.items())],
            "late": [[rank, *counts] for rank, counts in sorted(self.late.items())],
            "events": [self.events, self.counting_ns],
        }

    @classmethod
    def merged(cls, states: Iterable[Mapping[str, Any]], world_size: int, name: str = "") -> CommStats:
        """Return the ranks' counts as one CommStats.

        Calls, bytes and seconds are means over ranks; percentiles, maxima and failures are over all ranks' calls.

        Args:
            states: what each rank's `state` returned.
            world_size: the number of ranks of the Communicator.
            name: the Communicator's.
        """
        result = cls(world_size, name)
        result.ranks = 0
        for state in states:
            result.ranks += 1
            for entry in state["tallies"]:
                key = entry["operation"], entry["label"], entry["bucket"], entry["part"]
                result.tallies.setdefault(key, Tally()).absorb(Tally.restored(entry))
            for name, label, bucket, *counts in state["phases"]:
                whole = result.phases.get((name, label, bucket), [0] * len(counts))
                result.phases[name, label, bucket] = _merged(whole, counts)
            for rank, *counts in state["late"]:
                result.late[rank] = _merged(result.late.get(rank, [0, 0, 0]), counts)
            result.events += state["events"][0]
            result.counting_ns += state["events"][1]
        result.ranks = max(result.ranks, 1)
        return result

    def without(self, earlier: CommStats) -> CommStats:
        """Return the seconds and counts since an earlier state of these stats; percentiles and maxima are of all.

        Buckets that were merged since then are counted with those of their label.
        """
        result = CommStats.merged([self.state()], self.world_size, self.name)
        now, then = ({key: each.calls for key, each in stats.tallies.items()} for stats in (self, earlier))
        for key, tally in earlier.tallies.items():
            if (held := result.tallies.get(_held_by(key, now, then))) is not None:
                held.leave_out(tally)
        after, before = ({key: each[0] for key, each in stats.phases.items()} for stats in (self, earlier))
        for phase, counts in earlier.phases.items():
            if (found := result.phases.get(_held_by(phase, after, before))) is not None:
                found[:3] = [max(0, mine - theirs) for mine, theirs in zip(found[:3], counts, strict=False)]
        for rank, (last, ns, _) in earlier.late.items():
            mine = result.late.pop(rank, [0, 0, 0])
            if mine[0] > last:
                result.late[rank] = [mine[0] - last, max(0, mine[1] - ns), mine[2]]
        return result


def _held_by(key: Any, now: Mapping[Any, int], then: Mapping[Any, int]) -> Any:
    """Return the key that has an earlier key's counts now: its own, or, once its label's buckets were merged, theirs.

    now, then: calls by key.
    """
    whole = (*key[:2], -1, *key[3:])
    in_buckets = sum(calls for each, calls in then.items() if each[2] >= 0 and (*each[:2], -1, *each[3:]) == whole)
    is_merged = now.get(key, 0) < then[key] or now.get(whole, 0) - then.get(whole, 0) >= in_buckets
    return whole if key[2] >= 0 and is_merged else key


def _merged(one: list[int], other: list[int]) -> list[int]:
    """Return the sums of two lists of counts; the last count is a maximum, of which the larger one is kept."""
    return [*(mine + theirs for mine, theirs in zip(one[:-1], other, strict=False)), max(one[-1], other[-1])]


def _mean(count: int, ranks: int) -> int:
    """Return the mean, rounded to a whole number; for collectives, which all ranks call alike, it is exact."""
    return count // ranks if count % ranks == 0 else round(count / ranks)
