"""benchmarks.observers: who watches changes from window to window, and what a step consists of is counted."""

from __future__ import annotations

from benchmarks.observers import costs
from benchmarks.observers.worker import Watched
from clcomm import Communicator


def test_windows_change_who_watches_and_nothing_else(tmp_path):
    comm = Communicator(transport="solo")
    watched = Watched(comm, "mlp", 8, tmp_path)
    events = watched.events()
    assert (events["collective"], events["phase"]) == (1, 6)  # data, forward_backward, sync, loss, optimizer, step
    assert events["kernel"] > 5
    calls = {}
    for watchers in ("none", "stats", "trace"):
        before = comm.stats.total("all_reduce", "gradients")["calls"]
        window = watched.window(watchers, 4)
        calls[watchers] = comm.stats.total("all_reduce", "gradients")["calls"] - before
        assert window["wall"] > 0 and window["cpu"] > 0
    assert calls == {"none": 0, "stats": 7, "trace": 7}  # three of them flush
    assert (tmp_path / "trace.json").is_file()


def test_every_kind_of_event_has_a_cost(monkeypatch):
    monkeypatch.setattr(costs, "_EVENTS", 100)
    monkeypatch.setattr(costs, "_ROUNDS", 2)
    assert set(costs.event_costs()) == {"phase, no observer"} | {
        f"{kind}, {who}" for kind in ("collective", "phase") for who in ("stats", "trace")
    } | {"kernel, trace"}
