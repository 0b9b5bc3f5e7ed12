"""Ranks that end in every way, their host's exit monitor, and a launcher: who reports whom, and who ends whom.

The monitor is the real `watch_host` with the real records; processes, descriptors and the clock are the model's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from clcomm.comm.watch import exit_monitor_process as monitor
from clcomm.comm.watch import rank_record
from clcomm.comm.watch.exit_monitor_process import FAILING, LEAVING, RECORD_BYTES
from clcomm.comm.watch.rank_record import RankRecord
from tests.model_checker.course import Op, ask
from tests.model_checker.machine import Machine
from tests.model_checker.memory import shared_memory
from tests.model_checker.scenario import DEAD, STAY, Outcomes, Scenario, State

#: Seconds of a step of the clock, and the last.
TICK_S, LAST_S = 2.0, 5.0
_EXITED = 256  # as os.wait returns the status of exit code 1
NOT_STARTED = "not started, as a rank died before"


class Processes(NamedTuple):
    """The world outside of the ranks' code.

    statuses: of each rank, as os.wait returns it; None while it runs.
    events: descriptors that epoll has to report, in order.
    arrived: the ranks that are at the collective.
    output: the reports of ranks and monitor.
    clock_s: the time.
    causes: who ended by itself, or was killed by somebody else, in order.
    is_failing: whether a rank reports its own failure.
    """

    statuses: tuple
    events: tuple = ()
    arrived: frozenset = frozenset()
    output: tuple = ()
    clock_s: float = 1.0
    causes: tuple = ()
    is_failing: bool = False


def _records(ranks: int) -> Any:
    return shared_memory(0, ranks * RECORD_BYTES).view("q")


def _ended(ranks: int, state: State, rank: int, status: int, is_cause: bool) -> State:
    """Return the state after a process's end: its pipe closes, then its pidfd is readable."""
    world: Any = state.extra
    if world.statuses[rank] is not None:
        return state
    statuses = (*world.statuses[:rank], status, *world.statuses[rank + 1 :])
    events = (*world.events, ranks + rank, rank)
    causes = (*world.causes, rank) if is_cause else world.causes
    return state._replace(extra=world._replace(statuses=statuses, events=events, causes=causes))


# --- the ranks ---


def rank_program(rank: int, ranks: int, how: str) -> Any:
    """A rank of a job whose ranks meet once; how: "ends", "fails", or an exit code with which it leaves before that."""
    with mock.patch.object(rank_record, "os", SimpleNamespace(getpid=lambda: 1000 + rank)):
        record = RankRecord()
        record.join(_records(ranks), rank, rank)
        ask("joined")
        if how == "fails":
            record.note(FAILING)
            ask("print", f"rank {rank} failed")
            return ask("exit", _EXITED)
        if how != "ends":
            return ask("exit", int(how) * _EXITED)
        ask("meet")
        record.note(LEAVING)
        return ask("exit", 0)


def launcher_program(ranks: int) -> Any:
    """MPICH's: it kills all ranks when one has died or failed, and overlooks an exit with code 0."""
    ask("launched")
    for rank in range(ranks):
        ask("kill", rank, signal.SIGKILL, "launcher")
    return None


# --- the monitor ---


class _Epoll:
    def __init__(self, clock: _Clock):
        self._clock = clock

    def poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        deadline_s = None if timeout_s is None else self._clock.now_s + timeout_s
        return [(each, 1) for each in ask("poll", deadline_s)]

    def unregister(self, handle: int) -> None:
        pass


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s = ask("clock")
        return self.now_s


def monitor_program(ranks: int) -> Any:
    """The monitor of the host: handles 0 to ranks - 1 are pidfds, then come the pipes, and the launcher's pidfd."""
    clock = _Clock()
    if not ask("all joined"):
        return NOT_STARTED
    system = SimpleNamespace(
        fstat=lambda descriptor: SimpleNamespace(st_size=ranks * RECORD_BYTES),
        write=lambda descriptor, line: ask("print", line.decode()),
        WIFEXITED=os.WIFEXITED, WIFSIGNALED=os.WIFSIGNALED, WTERMSIG=os.WTERMSIG, WEXITSTATUS=os.WEXITSTATUS,
    )  # fmt: skip
    names = ("SIGTERM", "SIGKILL", "SIGRTMIN", "SIGRTMAX", "Signals")
    signals = SimpleNamespace(
        pidfd_send_signal=lambda handle, number: ask("kill", handle, int(number), "monitor"),
        **{name: getattr(signal, name) for name in names},
    )
    selects = SimpleNamespace(
        epoll=SimpleNamespace(fromfd=lambda ends: _Epoll(clock)), select=lambda handles, *rest: (handles, [], [])
    )
    with mock.patch.multiple(
        monitor, ignore_signals=lambda: None, os=system, signal=signals, select=selects, time=clock,
        mmap=SimpleNamespace(mmap=lambda memory, size: memory),
        memoryview=lambda memory: SimpleNamespace(cast=lambda code: _records(ranks)),
        exit_status=lambda pid, handle: ask("status", handle),
        write_while_collected=lambda line, others: ask("print", line), create=True,
    ):  # fmt: skip
        monitor.watch_host(0, 0, *range(2 * ranks + 1))
    return None


# --- the world's steps ---


def handlers(ranks: int) -> dict[str, Callable[[Machine, State, int, Op], Outcomes]]:
    def changed(state: State, **fields: Any) -> State:
        world: Any = state.extra
        return state._replace(extra=world._replace(**fields))

    def meet(machine: Machine, state: State, rank: int, op: Op) -> Outcomes:
        world: Any = state.extra
        if len(world.arrived) == ranks:
            return [(None, state)]
        return [] if rank in world.arrived else [(STAY, changed(state, arrived=world.arrived | {rank}))]

    def leave(machine: Machine, state: State, rank: int, op: Op) -> Outcomes:
        world: Any = state.extra
        return [(None, _ended(ranks, state, rank, op[1], len(world.arrived) < ranks))]

    def joined(machine: Machine, state: State, rank: int, op: Op) -> Outcomes:
        """The ranks go on, and the monitor starts, once all records are written; if a rank dies before, none starts."""
        written = [state.memory[machine._place(RECORD_BYTES * each + 8 * monitor.PID)] for each in range(ranks)]
        world: Any = state.extra
        if all(written):
            return [(True, state)]
        return [(False, state)] if None not in world.statuses else []

    def kill(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
        _, rank, number, _ = op
        world: Any = state.extra
        if world.statuses[rank] is not None:
            return [(None, state)]
        ended = _ended(ranks, state, rank, number, False)
        nodes = tuple(DEAD if each == rank else node for each, node in enumerate(ended.nodes))
        outcomes: Outcomes = [(None, ended._replace(nodes=nodes))]
        if number == signal.SIGTERM:
            outcomes.append((None, state))  # it is stopped, or ignores it
        return outcomes

    def launched(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
        world: Any = state.extra
        known = [status for status in world.statuses if status is not None]
        return [(None, state)] if any(known) or len(known) == ranks else []

    def poll(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
        world: Any = state.extra
        if world.events:
            return [(world.events[:1], changed(state, events=world.events[1:]))]
        return [] if op[1] is None else [((), changed(state, clock_s=max(op[1], world.clock_s)))]

    return {
        "meet": meet, "exit": leave, "kill": kill, "launched": launched, "poll": poll, "joined": joined,
        "all joined": joined,
        "print": lambda machine, state, actor, op: [(None, changed(state, output=(*state.extra.output, op[1])))],
        "status": lambda machine, state, actor, op: [(state.extra.statuses[op[1]], state)],
        "clock": lambda machine, state, actor, op: [(state.extra.clock_s, state)],
    }  # fmt: skip


def tick(machine: Machine, state: State) -> Iterator[tuple[str, State]]:
    """The clock goes on, at any time."""
    world: Any = state.extra
    if world.clock_s < LAST_S and (world.causes or DEAD in state.nodes):
        yield f"{TICK_S} s pass", state._replace(extra=world._replace(clock_s=world.clock_s + TICK_S))


def died(ranks: int, state: State, actor: int) -> State:
    """Queue what the kernel reports of a death by SIGKILL; the launcher is the last actor."""
    if actor < ranks:
        return _ended(ranks, state, actor, signal.SIGKILL, True)
    world: Any = state.extra
    return state._replace(extra=world._replace(events=(*world.events, 2 * ranks)))


# --- what has to hold ---


def check(ranks: int, last: dict[str, Any], state: State) -> str:
    """Every rank has ended; one that ended before the others could go on is reported, and none that it took along.

    A rank that is killed while it reports its own failure is reported by nobody: it may just have done it.
    """
    world: Any = state.extra
    running = [rank for rank, status in enumerate(world.statuses) if status is None]
    if running:
        return f"ranks {running} run on"
    reports = [line for line in world.output if "the launcher is gone" not in line]
    named = {*world.causes, 0} if world.is_failing else set(world.causes)
    for report in reports:
        rank = int(report.removeprefix("clcomm: ").split()[1])
        if rank not in named:
            return f"{reports} name another rank than {world.causes}"
        named.remove(rank)
    is_early = world.causes and len(world.arrived) < ranks and last["monitor"] != NOT_STARTED
    if is_early and not reports and not world.is_failing:
        return f"nobody reports that rank {world.causes[0]} ended"
    return ""


def scenario(name: str, ends: list[str], deaths: int = 0, mortal: list[str] | None = None) -> Scenario:
    ranks = len(ends)
    programs = {f"rank {rank}": partial(rank_program, rank, ranks, how) for rank, how in enumerate(ends)}
    programs |= {"monitor": partial(monitor_program, ranks), "launcher": partial(launcher_program, ranks)}
    return Scenario(
        f"exit monitor, {ranks} ranks, {name}", programs, partial(check, ranks),
        deaths=deaths, mortal=mortal or list(programs)[:ranks],
        extra=Processes((None,) * ranks, is_failing="fails" in ends),
        handlers=handlers(ranks), world=tick, on_death=partial(died, ranks), names=_name,
    )  # fmt: skip


def _name(offset: int) -> str:
    rank, byte = divmod(offset, RECORD_BYTES)
    return f"{('state', 'step', 'rank', 'pid', 'reported', 'start')[byte // 8]}[{rank}]"


def scenarios(ranks: int) -> list[Scenario]:
    end = ["ends"] * ranks
    return [
        scenario("all end", end),
        scenario("one dies", end, deaths=1),
        scenario("one leaves with code 0", ["0", *end[1:]]),
        scenario("one leaves with code 3", ["3", *end[1:]]),
        scenario("one fails", ["fails", *end[1:]]),
        scenario("one fails, one dies", ["fails", *end[1:]], deaths=1),
        scenario("the launcher dies", end, deaths=1, mortal=["launcher"]),
    ]
