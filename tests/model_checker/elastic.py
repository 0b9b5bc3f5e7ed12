"""Ranks that go on when others die: the real loop of `Session.run`, `elastic` and `MovingState`, on MPI as ULFM has it.

The model of MPI: a collective needs what its ranks contribute. A rank that waits in a collective of a communicator with
a dead rank gets an error, as Open MPI has it, or the result where that is complete. A revoked communicator may still
complete what all have come to. `Shrink`
waits for all live ranks; a rank that dies meanwhile may be in the new communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from clcomm.sync import elastic
from tests.model_checker.course import LAST, Op, ask
from tests.model_checker.machine import Machine
from tests.model_checker.memory import LostRank
from tests.model_checker.scenario import DEAD, STAY, Outcomes, Scenario, State
from training import session, trainer_state
from training.trainer_state import MovingState


class Comm(NamedTuple):
    """A communicator.

    members: its ranks.
    revoked: whether it is.
    given: what they contributed: (call, rank, value).
    shrinking: who has come to shrink it: (call, rank).
    shrunk: the communicators that were made.
    taken: how many of these a rank has got: (rank, number).
    duplicate: the communicator of the same ranks that was made.
    """

    members: tuple
    revoked: bool = False
    given: frozenset = frozenset()
    shrinking: frozenset = frozenset()
    shrunk: tuple = ()
    taken: frozenset = frozenset()
    duplicate: int = -1


class FakeProcess:
    """What `mpi_runtime.process_mpi` has; survivors: a communicator's number and its ranks."""

    survivors: tuple[int, tuple] | None = None

    def shrink(self, comm: tuple[int, tuple]) -> tuple[int, tuple]:
        self.survivors = ask("shrink", comm[0])
        return self.survivors


class FakeCommunicator:
    """The part of a Communicator that elastic runs use, on a duplicate of the communicator that it gets."""

    def __init__(self, comm: tuple[int, tuple], starts: bool = True):
        self.comm, self._calls = comm, 0
        self.rank, self.size = comm[1].index(_me[-1]), len(comm[1])
        #: What `MovingState.newest` holds in no variable before it has all of it.
        self.received: list[Any] = []
        if starts:
            self.comm = ask("dup", comm[0])
            if self.comm == "lost":
                raise LostRank
            try:
                self._gather("new")
            except LostRank:
                ask("revoke", self.comm[0])
                raise

    def _gather(self, value: Any, root: int | None = None) -> Any:
        self._calls += 1
        needs = self.comm[1] if root is None else (self.comm[1][root],)
        found = ask("gather", self.comm[0], self._calls, value, needs)
        if found == "lost":
            raise LostRank
        self.received += [] if root is None else [found]
        return [each for _, each in found]

    def settings(self) -> dict[str, Any]:
        return {}

    def abandon(self) -> None:
        ask("revoke", self.comm[0])

    def all_gather_object(self, value: Any, label: str = "") -> list[Any]:
        return self._gather(value)

    def broadcast(self, array: np.ndarray, root: int, label: str = "") -> None:
        (array[...],) = self._gather(array.item() if self.rank == root else None, root)

    def broadcast_object(self, value: Any, root: int, label: str = "") -> Any:
        own = (value[0]["progress"]["step"], value[2]) if self.rank == root else None  # of no policy
        ((step, numbers),) = self._gather(own, root)
        return {"progress": {"step": step}}, {}, numbers


_me: list[int] = []


class FakeTrainer:
    """A training whose state is a function of its step."""

    def __init__(self, step: int, weight: int, momentum: int):
        self.step, self.weight, self.momentum = step, np.array([weight]), np.array([momentum])
        self.model = SimpleNamespace(state_dict=lambda: {"w": self.weight})
        self.optimizer = SimpleNamespace(state_dict=lambda: {"m": self.momentum})
        self.progress = SimpleNamespace(step=step)
        self.sync = SimpleNamespace(models=SimpleNamespace(settings=SimpleNamespace(policy=None)))


class FakeSession:
    """What `Session.run` needs of a session."""

    def __init__(self, comm: FakeCommunicator, steps: int):
        self.comm, self._steps, self._numbers = comm, steps, None
        self.trainer = FakeTrainer(0, 0, 0)
        self.options = SimpleNamespace(elastic=True)
        self._checkpoints = SimpleNamespace(resume=lambda trainer: None, close=lambda: None)

    def _train(self) -> None:
        trainer = self.trainer
        while trainer.step < self._steps:
            told = (trainer.step, int(trainer.weight[0]), int(trainer.momentum[0]))
            everyone = self.comm.all_gather_object(told)
            assert all(each == told for each in everyone), f"ranks differ: {everyone}"
            trainer.weight[0] += 1
            trainer.momentum[0] += 2
            trainer.step += 1
            trainer.progress.step = trainer.step

    def say(self, line: str) -> None:
        """Nobody reads it."""

    def traced(self) -> Any:
        return session.nullcontext()

    def finish(self) -> Any:
        self.comm.all_gather_object("evaluated")
        return self.trainer.step, int(self.trainer.weight[0]), int(self.trainer.momentum[0])

    def _take_over(self, old: FakeTrainer, state: MovingState) -> None:
        step = state.training["progress"]["step"]
        self.comm.all_gather_object("trainer")  # as its loaders and Synchronizer are made
        self.trainer = FakeTrainer(step, int(state.model["w"][0]), int(state.optimizer["m"][0]))

    def _go_on_with_survivors(self) -> None:
        session.Session._go_on_with_survivors(self)  # type: ignore[arg-type]


def _only_agree(made: FakeSession) -> None:
    made.comm = elastic.survivors_of(made.comm)  # type: ignore[assignment, arg-type]


def program(rank: int, ranks: int, steps: int, moves: bool) -> Any:
    """moves: whether the state moves from rank to rank; else ranks only agree on who is left."""
    _me.append(rank)
    process = FakeProcess()
    job = SimpleNamespace(communicators=SimpleNamespace(owners_among=lambda ranks: []))
    failures = SimpleNamespace(
        is_lost_peer=lambda error: isinstance(error, LostRank), survivors=process.shrink,
        revoke=lambda comm: ask("revoke", comm[0]),
    )  # fmt: skip
    with (
        mock.patch.multiple(
            elastic, Communicator=FakeCommunicator, mpi_failures=failures, this_job=lambda: job,
            world_ranks=lambda comm: comm[1], forget_abandoned=lambda: None, process_mpi=lambda: process,
        ),
        mock.patch.object(trainer_state, "state_of", lambda trainer: {"progress": {"step": trainer.step}}),
        mock.patch.multiple(
            session, make_console=lambda comm: SimpleNamespace(print=lambda *text, **how: None),
            time=SimpleNamespace(perf_counter=lambda: 0.0),
        ),
    ):  # fmt: skip
        made = FakeSession(FakeCommunicator((0, tuple(range(ranks))), starts=False), steps)
        if not moves:
            made._go_on_with_survivors = partial(_only_agree, made)  # type: ignore[method-assign]
        return session.Session.run(made)  # type: ignore[arg-type]


# --- MPI ---


def _is_lost(machine: Machine, state: State, actor: int) -> bool:
    node = state.nodes[actor]
    return node == DEAD or machine.courses[actor].ops[node][0] in LAST


def _with(state: State, number: int, comm: Comm) -> State:
    comms: Any = state.extra
    return state._replace(extra=(*comms[:number], comm, *comms[number + 1 :]))


def gather(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
    _, number, call, value, needs = op
    comm: Comm = state.extra[number]  # type: ignore[index]
    given = {rank: theirs for at, rank, theirs in comm.given if at == call}
    lost = [rank for rank in comm.members if _is_lost(machine, state, rank)]
    is_needed = comm.revoked or bool(lost)
    outcomes: Outcomes = [("lost", state, *(() if is_needed else (False,)))] if lost or comm.revoked else []
    if actor not in given:
        return [*outcomes, (STAY, _with(state, number, comm._replace(given=comm.given | {(call, actor, value)})))]
    if all(rank in given for rank in needs):
        outcomes.append((tuple((rank, given[rank]) for rank in needs), state))
    return outcomes


def duplicate(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
    number = op[1]
    outcomes = []
    for result, after, *comes in gather(
        machine, state, actor, ("gather", number, 0, None, state.extra[number].members)
    ):  # type: ignore[index]
        comm: Comm = after.extra[number]  # type: ignore[index]
        if result is not STAY and result != "lost":
            if comm.duplicate < 0:
                comms: Any = _with(after, number, comm._replace(duplicate=len(after.extra))).extra  # type: ignore[arg-type]
                after = after._replace(extra=(*comms, Comm(comm.members)))
            result = after.extra[number].duplicate, comm.members  # type: ignore[index]
        outcomes.append((result, after, *comes))
    return outcomes


def revoke(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
    comm: Comm = state.extra[op[1]]  # type: ignore[index]
    return [(None, _with(state, op[1], comm._replace(revoked=True)))]


def shrink(machine: Machine, state: State, actor: int, op: Op) -> Outcomes:
    """A rank's first call meets the others' first, its second their second."""
    number = op[1]
    comms: Any = state.extra
    comm: Comm = comms[number]
    call = dict(comm.taken).get(actor, 0)
    done = comm._replace(taken=comm.taken - {(actor, call)} | {(actor, call + 1)})
    if call < len(comm.shrunk):
        made = comm.shrunk[call]
        return [((made, comms[made].members), _with(state, number, done))]
    if (call, actor) not in comm.shrinking:
        return [(STAY, _with(state, number, comm._replace(shrinking=comm.shrinking | {(call, actor)})))]
    live = [rank for rank in comm.members if not _is_lost(machine, state, rank)]
    if not all((call, rank) in comm.shrinking for rank in live):
        return []
    outcomes: Outcomes = []
    for members in {tuple(live), tuple(rank for rank in comm.members if (call, rank) in comm.shrinking)}:
        after = _with(state, number, done._replace(shrunk=(*comm.shrunk, len(comms))))
        outcomes.append(((len(comms), members), after._replace(extra=(*after.extra, Comm(members)))))  # type: ignore[misc]
    return outcomes


HANDLERS: dict[str, Callable[[Machine, State, int, Op], Outcomes]] = {
    "gather": gather,
    "dup": duplicate,
    "revoke": revoke,
    "shrink": shrink,
}


def check(steps: int, last: dict[str, Any], state: State) -> str:
    """Who lives has the state of the undisturbed run."""
    wrong = [
        f"{name} ends with {found}" for name, found in last.items() if found not in (None, (steps, steps, 2 * steps))
    ]
    return "; ".join(wrong)


def scenario(ranks: int, steps: int, deaths: int, moves: bool = True) -> Scenario:
    return Scenario(
        f"elastic, {ranks} ranks, {steps} steps, {deaths} die" + ("" if moves else ", agreement alone"),
        {f"rank {rank}": partial(program, rank, ranks, steps, moves) for rank in range(ranks)},
        partial(check, steps), deaths=deaths, extra=(Comm(tuple(range(ranks))),), handlers=HANDLERS,
    )  # fmt: skip


def scenarios(ranks: int) -> list[Scenario]:
    agreement = scenario(ranks, 0, min(2, ranks - 1), moves=False)
    return [agreement] if ranks > 3 else [agreement, scenario(ranks, 2, 1), scenario(ranks, 1, ranks - 1)]
