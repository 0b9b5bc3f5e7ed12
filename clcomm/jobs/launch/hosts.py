"""The named hosts of a job under `clcomm run --min-ranks`: which of them answer, and what they are told.

On each host a process, started by the MPI's launcher as ranks are, answers once a second (host_agent.py). A host is
lost where its process has ended and cannot be started again, and where no answer comes for LOST_S: a machine that is
off, or a cable that is cut, sends nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from clcomm.comm.watch import worlds
from clcomm.jobs.launch.host_agent import ALL, ANSWER, END, KILL, STOP
from clcomm.jobs.launch.keeper_process import kill_children
from clcomm.jobs.launch.mpiexec import HostList
from clcomm.jobs.launch.supervisor import print_notice

#: Seconds between two questions, until an answer, and until the first one of a process that is started.
ASK_S, LOST_S, START_S = 1.0, 10.0, 30.0
#: Seconds between two attempts to reach a lost host, and for an orderly end.
RETRY_S, END_S = 10.0, 2.0
#: Seconds for which a host that was lost has answered before ranks end for its sake.
STEADY_S = 10.0


class Agent:
    """The process on one host.

    Attributes:
        answers: whether the host can have ranks.
        is_lost: whether it is given up until it is tried again.
        was_lost: whether it has been since it last answered.
        back_s: when it answered again after it was lost, by time.monotonic(), until `Hosts.returned` has named it; inf:
            it has not.
        reason: why, in words.
    """

    def __init__(self, host: str, command: list[str], environment: Mapping[str, str]):
        self.host, self.reason = host, ""
        self.answers = self.is_lost = self.was_lost = False
        self.back_s = math.inf
        self._command, self._environment = command, environment
        self._until_s = 0.0  # when the answer has to be there; inf: nothing is asked
        self._asked = ""
        self.start(START_S)

    def start(self, within_s: float) -> None:
        """Start the process, which has to answer within this time."""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            start_new_session=True, env=self._environment,  # Ctrl-C is not its affair
        )  # fmt: skip
        self._rest, self._said, self.is_lost, self._is_new = b"", "", False, True
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._input, self.output):
            os.set_blocking(descriptor, False)
        self.ask(*(KILL, ALL) if self.was_lost else (ANSWER, 0))  # after a cut ranks may wait there still
        self._until_s = self._asked_s + within_s

    def ask(self, word: str, number: int) -> None:
        """Ask for an answer, in place of one that is awaited."""
        now_s = time.monotonic()
        self._until_s = min(self._until_s, now_s + LOST_S) if self._asked else now_s + LOST_S
        self._asked, self._asked_s = f"{word} {number}", now_s
        self.tell(word, number)

    def tell(self, word: str, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended, or has not read for a long time: no answer will come
            os.write(self._input, f"{word} {number}\n".encode())

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    @property
    def idle_s(self) -> float:
        """Seconds since the last question."""
        return time.monotonic() - self._asked_s

    def hear(self) -> list[bytes]:
        """Return what ranks of the host told; note the answer, or the end of the process."""
        try:
            read = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        if not read:
            self._ended()
            return []
        *lines, self._rest = (self._rest + read).split(b"\n")
        told = []
        for each in lines:
            line = each.decode(errors="replace").strip()
            if line == self._asked:
                self._asked, self.answers, self._is_new = "", True, False
            elif worlds.read(each):
                told.append(each)
            elif line and line.split()[0] not in (ANSWER, KILL):
                self._said = self._said or line
        return told

    def judge(self) -> None:
        """Give the host up where its answer is overdue."""
        if self._asked and not self.is_lost and time.monotonic() >= self._until_s:
            self.lose("it could not be reached in time" if self._is_new else f"no answer for {LOST_S:g} s")

    def lose(self, reason: str) -> None:
        self.answers, self.is_lost, self.reason, self._asked = False, True, reason, ""
        self._asked_s = time.monotonic()
        self.close(0.0)

    def _ended(self) -> None:
        """Start it again, once, as it may have been ended alone."""
        asked, said, was_new = self._asked, self._said, self._is_new
        self.close(0.0)
        if was_new:
            self.lose(said or "its process ended at once")
            return
        self._asked = ""
        try:
            self.start(LOST_S)
        except OSError as error:
            self.lose(f"its process cannot be started again: {error.strerror}")
            return
        if asked.startswith(KILL):
            word, number = asked.split()
            self.ask(word, int(number))

    def close(self, within_s: float) -> None:
        """End the process, with the launcher's; not at once where it needs this time to do what it was told."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        if self._process.poll() is None:
            kill_children(self._process.pid)  # they connect it with the host, and would wait for a silent one for ever
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Hosts:
    """A job's hosts, as far as the user names them; nothing happens where he names none.

    Args:
        listed: the names.
        command: returns the command line of a number of ranks, up to their program, from the options --hosts and
            --hostfile.
    """

    def __init__(self, listed: HostList, command: Callable[[int, str, str], list[str]]):
        self._listed, self._command = listed, command
        self._agents: dict[str, Agent] = {}
        self.names, self._folder = listed.names, Path()
        self._told: list[bytes] = []

    def open(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Start a process on each, in this environment, and wait until all answer or are lost."""
        self._folder = folder
        for name in self._listed.names:
            agent = [*self._start(1, [name]), sys.executable, "-m", "clcomm.jobs.launch.host_agent", str(folder)]
            self._agents[name] = Agent(name, agent, environment)
        self._settle(list(self._agents.values()))

    def close(self) -> None:
        """Let them remove the job's copies, and end."""
        for agent in self._agents.values():
            if not agent.is_lost:
                agent.tell(END, 0)
        for agent in self._agents.values():
            if not agent.is_lost:
                agent.close(END_S)

    def launch(self, ranks: int) -> list[str]:
        """Return the launcher's command line, up to their program, for ranks on the hosts that answer."""
        return self._start(ranks, self.left)

    def _start(self, ranks: int, hosts: Collection[str]) -> list[str]:
        return self._command(ranks, *self._listed.options(hosts, self._folder))

    @property
    def left(self) -> list[str]:
        """The names of those that answer."""
        return [agent.host for agent in self._agents.values() if agent.answers]

    @property
    def descriptors(self) -> list[int]:
        """Readable where `attend` has something to do."""
        return [agent.output for agent in self._agents.values() if not agent.is_lost]

    def room(self, ranks: int) -> int:
        """Return how many ranks those that answer can have, of a job that is to have so many."""
        return self._listed.room(ranks, self.left) if self.names else ranks

    def returned(self, used: Collection[str]) -> list[str]:
        """Return the names of those that were lost, have answered again for STEADY_S, and are not among the used.

        Once for each return: one on which ranks then cannot be started is not tried for ever.
        """
        now_s = time.monotonic()
        back = [each for each in self._agents.values() if each.answers and now_s - each.back_s >= STEADY_S]
        for agent in back:
            agent.back_s = math.inf
        return [agent.host for agent in back if agent.host not in used]

    def used(self, ranks: int) -> set[str]:
        """Return the hosts on which the launcher starts ranks now."""
        return {name for name, count in self._listed.dealt(ranks, self.left).items() if count}

    def attend(self) -> list[bytes]:
        """Return what ranks told; ask again where it is time, and give up those that are silent."""
        found, _, _ = select.select(self.descriptors, [], [], 0.0)
        for agent in self._agents.values():
            if agent.is_lost:
                if agent.idle_s >= RETRY_S:
                    with contextlib.suppress(OSError):  # no descriptor is free now
                        agent.start(START_S)
                continue
            if agent.output in found:
                self._told += agent.hear()
            agent.judge()
            if agent.is_lost != agent.was_lost and (agent.is_lost or agent.answers):
                agent.was_lost = agent.is_lost
                agent.back_s = math.inf if agent.is_lost else time.monotonic()
                print_notice(f"host {agent.host} {f'is lost: {agent.reason}' if agent.is_lost else 'answers again'}")
            if agent.answers and not agent.is_asked and agent.idle_s >= ASK_S:
                agent.ask(ANSWER, 0)
        told, self._told = self._told, []
        return told

    def ask_to_stop(self, world: int) -> None:
        """Let a world's ranks end at a step's end."""
        for agent in self._agents.values():
            if agent.answers:
                agent.tell(STOP, world)

    def end(self, world: int, kills: bool) -> list[bytes]:
        """Wait until it is known which hosts still answer; return what ranks told until a world's end.

        kills: whether to end what is left of the world on all of them.
        """
        asked = [agent for agent in self._agents.values() if agent.answers]
        for agent in asked:
            agent.ask(KILL if kills else ANSWER, world)
        self._settle(asked)
        return self.attend()

    def _settle(self, asked: list[Agent]) -> None:
        while any(agent.is_asked and not agent.is_lost for agent in asked):
            select.select(self.descriptors, [], [], ASK_S / 10)
            self._told = self.attend()
