"""Bugs that are planted into the real code, each with the exploration that has to find it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.model_checker import elastic, exit_monitor, programs, sharing
from tests.model_checker.scenario import Scenario


class Planted(NamedTuple):
    """A bug: the function, or KERNEL, where `old` becomes `new`, and how to look for it."""

    name: str
    place: str
    old: str
    new: str
    scenario: Callable[[], Scenario]


KERNEL = "fold.cl"


@contextlib.contextmanager
def plant(bug: Planted) -> Iterator[None]:
    """Change the code for a while."""
    if bug.place == KERNEL:
        text = programs.SOURCE["text"]
        assert text.count(bug.old) == 1, f"{bug.name}: not in {KERNEL} once: {bug.old}"
        programs.SOURCE["text"] = text.replace(bug.old, bug.new)
        try:
            yield
        finally:
            programs.SOURCE["text"] = text
        return
    module_name, _, path = bug.place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(bug.old) == 1, f"{bug.name}: not in {bug.place} once: {bug.old}"
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + text.replace(bug.old, bug.new), f"<{bug.name}>", "exec")
    exec(code, function.__globals__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, function)


def _one(make: Callable[[int], list[Scenario]], ranks: int, name: str) -> Callable[[], Scenario]:
    return lambda: next(each for each in make(ranks) if name in each.name)


def _meets(name: str, ranks: int = 2) -> Callable[[], Scenario]:
    return _one(sharing.rendezvous_scenarios, ranks, name)


def _work(name: str) -> Callable[[], Scenario]:
    return _one(sharing.work_scenarios, 2, name)


def _ends(name: str) -> Callable[[], Scenario]:
    return _one(exit_monitor.scenarios, 2, name)


def _goes_on(name: str, ranks: int = 3) -> Callable[[], Scenario]:
    return _one(elastic.scenarios, ranks, name)


def _ring(name: str) -> Callable[[], Scenario]:
    return _one(lambda ranks: sharing.ring_scenarios(), 2, name)


_RENDEZVOUS = "clcomm.comm.transport.rendezvous:HostRendezvous"
_FUTEX = "clcomm.comm.transport.futex:Futex"
_SLOTS = "clcomm.comm.transport.slots:SharedSlots"
_QUEUE = "clcomm.comm.transport.work_queue:WorkQueueReduction"
_MONITOR = "clcomm.comm.watch.exit_monitor_process:"
_CAS = "} while (!__atomic_compare_exchange_n(word, &seen, next, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE));"
_PUBLISHED = "    own[side] = tag;\n    own[side + 1] = call[ARRIVED_NS];\n    PUBLISH(call, own, number);"

BUGS = [
    Planted("a flag before the words", f"{_RENDEZVOUS}.exchange",
            'self._own_words[parity][:count] = array("l", words)\n    self.barrier(kind)',
            'self.barrier(kind)\n    self._own_words[parity][:count] = array("l", words)', _meets("rendezvous")),
    Planted("tags on one side", f"{_RENDEZVOUS}.compare", "& 1]", "& 0]", _meets("different calls")),
    Planted("no fence before the counter", f"{_RENDEZVOUS}._advance",
            "self._fence()\n    counters[self.rank] = count", "counters[self.rank] = count",
            _meets("weak stores")),
    Planted("== in place of >=", f"{_FUTEX}.wait", "while counters[other] < count:", "while counters[other] != count:",
            _meets("rendezvous")),
    Planted("no look at MPI while waiting", f"{_FUTEX}.wait", "if polls % POLLS_BETWEEN_PROGRESS == 0:", "if False:",
            _meets("one dies")),
    Planted("no fence between mark and counter", f"{_FUTEX}._sleep", "self._fence()", "pass", _meets("sleeping")),
    Planted("a futex word that is read too late", f"{_FUTEX}._sleep", "self._futex(_WAIT, seen)",
            "self._futex(_WAIT, self._word[0])", _meets("sleeping")),
    Planted("a futex word that a late rank sets back", f"{_FUTEX}.wake",
            "(self._wakes * len(self._asleep) + self._rank)", "(self._word[0] + 1)",
            _one(sharing.work_scenarios, 3, "no polls")),
    Planted("a slot's side that does not alternate", "clcomm.comm.transport.staged:SlotReduction.reduce",
            "parity = self._rendezvous.parity", "parity = 0", _meets("slots")),
    Planted("own parts without the second rendezvous", "clcomm.comm.transport.shared:_fold_between",
            "rendezvous.leave()", "pass", _meets("own parts")),
    Planted("a part announced before it is folded", "clcomm.comm.transport.started:StartedReduction._fold_own",
            "self._fold()\n    return self._advance(self._folded)",
            "reached = self._advance(self._folded)\n    self._fold()\n    return reached", _meets("in the background")),
    Planted("nobody woken after a start", f"{_RENDEZVOUS}.arrive", "self._futex.wake()", "pass",
            _meets("in the background, sleeping")),
    Planted("a start looks for sleepers too early", f"{_RENDEZVOUS}._advance",
            "counters[self.rank] = count\n    self._fence()", "counters[self.rank] = count",
            _meets("in the background, sleeping")),
    Planted("no look at MPI while a rank waits for a start", "clcomm.comm.transport.started:_Reached.wait_and_look",
            "self._progress()", "pass", _meets("in the background, one dies")),
    Planted("who sleeps for a start does not look at blocking calls",
            "clcomm.comm.transport.started:_Reached.wait_and_look", "look()", "pass",
            _meets("blocking against background, sleeping")),
    Planted("blocking calls are not looked at", "clcomm.comm.transport.pending:StartOrder.differs",
            "counter > met if is_behind",
            "False if is_behind", _meets("blocking against")),
    Planted("one slot too many", f"{_SLOTS}.wait_for_room", "+ 1", "+ 0", _ring("ring of slots")),
    Planted("nobody woken after a slot", f"{_SLOTS}._advance", "self._host.rendezvous.wake()", "pass",
            _ring("sleeping")),
    Planted("the kernel's counter before its tag", KERNEL, _PUBLISHED,
            "    PUBLISH(call, own, number);\n    own[side] = tag;\n    own[side + 1] = call[ARRIVED_NS];",
            _meets("in a kernel")),
    Planted("the kernel leaves without the others", KERNEL,
            "if (leaves_sleepers(call) || !all_reached(call, cells, stride, number + 1, 0)) call[STATE] = NOT_LEFT;",
            "call[STATE] = COMPLETE;", _meets("in a kernel")),
    Planted("sleepers are not woken before a kernel's sum", KERNEL, "if (state == COMPLETE && wakes)", "if (0)",
            _meets("in a kernel, sleeping")),
    Planted("sleepers are not woken after a kernel's sum", KERNEL, "if (leaves_sleepers(call) || ", "if (",
            _meets("in a kernel, sleeping")),
    Planted("the kernel looks for sleepers too early", KERNEL, "    FENCE(call); /* the counter before the marks */\n",
            "", _meets("in a kernel, sleeping")),
    Planted("a part is counted without compare-and-swap", KERNEL, _CAS, "*word = next; } while (0);",
            _work("no polls")),
    Planted("parts of the sum before", KERNEL, "seen >> PART_BITS == number ? (int)PARTS_OF(seen) : 0",
            "seen ? (int)PARTS_OF(seen) : 0", _work("shared work, 2 ranks")),
    Planted("a part is counted before it is summed", KERNEL, "        const int first = taken * part;\n",
            "        const int first = taken * part;\n        advance(claims + 1, number, parts);\n",
            _work("no polls")),
    Planted("who sleeps on is not woken", f"{_QUEUE}._resume", "self._rendezvous.wake()", "pass", _work("no polls")),
    Planted("parts of others are not waited for", f"{_QUEUE}.complete",
            "rendezvous.wait_for(self._summed, complete, words[POLLED])",
            "pass", _work("no polls")),
    Planted("a rank that reports itself is reported", f"{_MONITOR}watch_host",
            "or any(other[STATE] == FAILING for other in records)", "", _ends("one fails")),
    Planted("those that the launcher ends are reported", f"{_MONITOR}ExitReporter.ends_job",
            "self.quiet_until = math.inf if ends_job else", "_ =", _ends("code 3")),
    Planted("quiet for two seconds alone", f"{_MONITOR}ExitReporter.ends_job", "math.inf if ends_job else", "",
            _ends("code 3")),
    Planted("who takes the others along while it leaves", f"{_MONITOR}ExitReporter.note_expected",
            "self.quiet_until = math.inf", "pass", _ends("one dies")),
    Planted("exit code 0 ends nobody", f"{_MONITOR}ExitReporter.ends_job", "not RANKS_MAY_DIE or", "", _ends("code 0")),
    Planted("SIGTERM alone after the launcher's end", f"{_MONITOR}watch_host",
            ", (now_s + ORPHAN_S, signal.SIGKILL)]", "]",
            _ends("launcher dies")),
    Planted("every rank sends its own state", "clcomm.sync.elastic:newest", "steps.index(max(steps))", "comm.rank",
            _goes_on("2 steps")),
    Planted("arrays arrive in the model itself", "clcomm.sync.elastic:send_arrays", "np.array(array)", "array",
            _goes_on("1 steps")),
    Planted("a death while the state moves ends the run", "training.session:Session._go_on_with_survivors",
            "if not elastic.is_lost_peer(error):", "if True:", _goes_on("1 steps")),
    Planted("the first communicator is shrunk again", "clcomm.sync.elastic:survivors_of", "old = shrunk", "pass",
            _goes_on("agreement", 4)),
    Planted("a duplicate is shrunk", "clcomm.sync.elastic:_origin_of", "comm if origin is None or", "comm if True or",
            _goes_on("agreement", 4)),
]  # fmt: skip
