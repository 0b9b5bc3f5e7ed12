"""Jobs that stay alive between windows: the parent sends requests, every rank answers, and waiting ranks use no core.

Each rank connects to the parent's Unix socket and blocks in a read until a request comes; a line of JSON goes each way.
So several systems can run at once and take turns on the same machine in the same state.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from clcomm.base.errors import LaunchError

#: This repository's root: workers start there.
ROOT = Path(__file__).resolve().parents[1]
_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 10.0
_RUN_LIMIT_S = 300.0
_SHOWN_CHARACTERS = 2000


def mpi_launch(ranks: int, python: str = sys.executable) -> list[str]:
    """Return the command that starts MPI ranks: the mpiexec beside a Python, else the one on the PATH."""
    beside = Path(python).with_name("mpiexec")
    command = [str(beside) if beside.exists() else "mpiexec"]
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise LaunchError(f"{command[0]}: cannot be run ({error.strerror}); install an MPI") from None
    if "Open MPI" in version or "OpenRTE" in version:
        command.append("--oversubscribe")
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return [*command, "-n", str(ranks)]


def run_to_end(
    ranks: int, *arguments: str, environment: Mapping[str, str] | None = None, limit_s: float = _RUN_LIMIT_S
) -> None:
    """Run Python with these arguments on `ranks` ranks. LaunchError with the end of its output where it fails."""
    command = [*mpi_launch(ranks), sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LaunchError(f"{' '.join(arguments)} ended with exit code {done.returncode}:\n{done.stderr.strip()}")


class Job:
    """A worker module running on `ranks` processes, under mpiexec or, with `mpi` False, plain with RANK, WORLD_SIZE.

    The module's main gets a directory for files of the job and `arguments` as its command line and calls `serve`.
    `python` is that of another environment. LaunchError with the end of the job's output where a process ends early.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        ranks: int = 1,
        mpi: bool = True,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ):
        self.module, self.ranks, self._python = module, ranks, python
        self._folder = tempfile.TemporaryDirectory(prefix="clcomm-bench-")
        directory = Path(self._folder.name)
        self._output = open(directory / "output", "w+", encoding="utf-8")  # noqa: SIM115 - open as long as the job
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "control"))
        self._listener.listen(ranks)
        self._links: dict[int, _Link] = {}
        worker = [python, "-m", module, str(directory), *arguments]
        self._processes = self._start(worker, mpi, {**os.environ, **(environment or {})})
        try:
            self._accept()
        except BaseException:
            self.close()
            raise

    def _start(self, worker: list[str], mpi: bool, environment: dict[str, str]) -> list[subprocess.Popen]:
        def start(command: list[str], **more: str) -> subprocess.Popen:
            return subprocess.Popen(
                command, cwd=ROOT, env={**environment, **more}, stdin=subprocess.DEVNULL, stdout=self._output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        if mpi:
            return [start([*mpi_launch(self.ranks, self._python), *worker])]
        return [start(worker, RANK=str(rank), WORLD_SIZE=str(self.ranks)) for rank in range(self.ranks)]

    def _accept(self) -> None:
        self._listener.settimeout(0.5)
        begin = time.monotonic()
        while len(self._links) < self.ranks:
            with contextlib.suppress(TimeoutError):
                link = _Link(self._listener.accept()[0])
                self._links[link.read()["rank"]] = link
                continue
            if any(process.poll() is not None for process in self._processes):
                raise self._failure("ended before it was ready")
            if time.monotonic() - begin > _START_LIMIT_S:
                raise self._failure(f"was not ready after {_START_LIMIT_S:.0f} s")

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Send a request to every rank and return their answers by rank."""
        for link in self._links.values():
            link.write(request)
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.connection, selectors.EVENT_READ, rank)
            while len(answers) < self.ranks:
                for key, _ in selector.select():
                    try:
                        answers[key.data] = self._links[key.data].read()
                    except EOFError:
                        raise self._failure(f"lost rank {key.data} in {request}") from None
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

    def _failure(self, what: str) -> LaunchError:
        time.sleep(0.3)  # the others' last words
        self._output.flush()
        text = Path(self._output.name).read_text(encoding="utf-8", errors="replace").strip()
        return LaunchError(f"{self.module} on {self.ranks} ranks {what}:\n{text[-_SHOWN_CHARACTERS:]}")

    def close(self) -> None:
        """End the job: ranks that wait for a request exit on their own, others are killed."""
        for link in self._links.values():
            link.close()
        self._listener.close()
        for process in self._processes:
            _end(process)
        self._output.close()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(process: subprocess.Popen) -> None:
    """Let a process exit, then terminate it, then kill it."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
            return


class _Link:
    """Lines of JSON over a connected socket."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(True)
        self.connection = connection
        self._lines = connection.makefile("rb")

    def write(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the read that follows finds the end
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = b""
        if not line:
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self.connection.close()


def serve(directory: str, rank: int, handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In a worker: answer the parent's requests with `handle` until the parent closes the connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(directory, "control")))
    link = _Link(connection)
    link.write({"rank": rank})
    while True:
        try:
            request = link.read()
        except EOFError:
            return
        link.write(handle(request))
