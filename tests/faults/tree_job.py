"""A rank that starts the processes of a drawn tree, as programs do, and says which of them did not end as they should.

`mpiexec -n 2 python -m tests.faults.tree_job '[[["before", "fork", 3]], [["after", "pool", 0]]]'`: for each rank,
when it starts what, and the end of that: an exit code, or -N for signal N, which it sends itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__mp_main__":  # a worker of start method spawn or forkserver, which imports what the script's head does
    import clcomm.comm.communicator

    if "TREE_TORCH" in os.environ:
        import clcomm.torch  # noqa: F401

#: When a rank starts a process: before it imports clcomm, before it has a Communicator, and after that.
MOMENTS = BEFORE, IMPORTED, AFTER = "before", "imported", "after"
#: How long any of them may take on a busy machine.
HUNG_S = 120.0
REFUSED = "clcomm: MPI: expected a rank, got process "
FAILED = "rank 0 exited unexpectedly with exit code 3 before" if "PMI_RANK" in os.environ else "Exit code:    3"
Finish = Callable[[], str]

END = """
import os, signal, sys, time
time.sleep(0.3)
end = int(sys.argv[1])
os.kill(os.getpid(), -end) if end < 0 else os._exit(end) if end % 2 else sys.exit(end)
"""
IMPORT = "import clcomm.comm.communicator\n"
MEETS = "from clcomm import Communicator; assert Communicator().all_gather_object(1) == [1, 1]"
FAILS = """
import clcomm.comm.communicator, os, sys
if "0" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    sys.exit(3)
clcomm.comm.communicator.Communicator()
"""


def end(code: int) -> None:
    """End this process as asked, a little later."""
    time.sleep(0.3)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code) if code % 2 else sys.exit(code)


def is_equal(kind: str, found: object, wanted: object) -> str:
    return "" if found == wanted else f"{kind}: {found} in place of {wanted}"


def run(kind: str, command: list[str], code: int | None, *, said: str | None = None) -> Finish:
    """Start a command.

    Args:
        kind: its name.
        command: its words.
        code: its own in the end; None: any but 0.
        said: what it has to say as an error, "": nothing of clcomm's; None: it writes to this rank's own.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=None if said is None else subprocess.PIPE, text=True
    )

    def finish() -> str:
        error = process.communicate(timeout=HUNG_S)[1] or ""
        if said is not None and (said not in error or (not said and "clcomm" in error)):
            return f"{kind}: said {error!r}"
        return is_equal(kind, process.returncode, code) if code is not None or not process.returncode else ""

    return finish


def python(text: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", text, *map(str, arguments)]


def forked(code: int) -> Finish:
    child = os.fork()
    if not child:
        end(code if code < 0 else code | 1)  # by os._exit: multiprocessing would wait there for its parent's workers
    return lambda: is_equal("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), code if code < 0 else code | 1)


def worker(method: str) -> Callable[[int], Finish]:
    def start(code: int) -> Finish:
        child = multiprocessing.get_context(method).Process(target=end, args=(code,))
        child.start()

        def finish() -> str:
            child.join(HUNG_S)
            return is_equal(method, child.exitcode, code)

        return finish

    return start


def ended_by_parent(code: int) -> Finish:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(HUNG_S,))
    child.start()
    time.sleep(1)
    child.terminate()
    child.join(HUNG_S)
    return lambda: is_equal("terminate", child.exitcode, -signal.SIGTERM)


def pool(method: str) -> Callable[[int], Finish]:
    def start(code: int) -> Finish:
        with multiprocessing.get_context(method).Pool(2) as workers:  # whose end is SIGTERM
            found = workers.map(abs, [-7, -8])
        return lambda: is_equal(f"pool {method}", found, [7, 8])

    return start


def executor(code: int) -> Finish:
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as workers:
        found = list(workers.map(abs, [-7, -8]))
    return lambda: is_equal("executor", found, [7, 8])


def loader(code: int) -> Finish:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    method = multiprocessing.get_context(("fork", "spawn", "forkserver")[code % 3])
    batches = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2, multiprocessing_context=method)
    return lambda: is_equal("loader", sum(batch.sum().item() for (batch,) in batches), 28.0)


def mpiexec(text: str, *, code: int | None, said: str) -> Finish:
    launcher = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return run("mpiexec", [launcher, "-n", "2", *python(text)], code, said=said)


def script(kind: str, code: int, around: str = "", ends: int | None = None) -> Finish:
    """Start a script that imports clcomm, within a shell's script."""
    command = python(IMPORT + END, code)
    return run(
        kind, ["sh", "-c", around, "sh", *command] if around else command, code if ends is None else ends, said=""
    )


def refused(kind: str, around: str = "") -> Finish:
    command = python("from clcomm import Communicator; Communicator()")
    return run(kind, ["sh", "-c", around, "sh", *command] if around else command, 1, said=REFUSED)


#: What a rank starts, by name; each takes the end of the process.
KINDS: dict[str, Callable[[int], Finish]] = {
    "fork": forked,
    **{method: worker(method) for method in ("spawn", "forkserver")},
    **{f"pool {method}": pool(method) for method in ("fork", "spawn", "forkserver")},
    "terminate": ended_by_parent,
    "executor": executor,
    "loader": loader,
    "helper": lambda code: run("helper", python(END, code), code),
    "script": lambda code: script("script", code),
    "shell": lambda code: script("shell", code, '"$@"; exit $?', code if code >= 0 else 128 - code),
    "left behind": lambda code: script("left behind", code, '"$@" & exit 0', 0),
    "solo": lambda code: run(
        "solo", python(f"from clcomm import Communicator\nCommunicator(transport='solo').barrier(){END}", code), code
    ),
    "refused": lambda code: refused("refused"),
    "refused in a shell": lambda code: refused("refused in a shell", '"$@"; exit $?'),
    "command": lambda code: run(
        "command", [sys.executable, "-m", "clcomm", "run", "-n", "2", __file__, "nested"], 0, said=""
    ),
    "mpiexec": lambda code: mpiexec(MEETS, code=0, said=""),
    "mpiexec that fails": lambda code: mpiexec(FAILS, code=None, said=FAILED),
}  # fmt: skip


def main() -> None:
    if sys.argv[1] == "nested":
        exec(MEETS)
        return
    own = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    tree = json.loads(sys.argv[1])[own]
    bystanders, started, wrong = [], [], []

    def start(moment: str) -> None:
        bystanders.append(subprocess.Popen(["sleep", str(10 * HUNG_S)]))
        started.extend(KINDS[kind](code) for when, kind, code in tree if when == moment)

    start(BEFORE)
    import clcomm.comm.communicator

    if "TREE_TORCH" in os.environ:
        import clcomm.torch
    start(IMPORTED)
    comm = clcomm.comm.communicator.Communicator()
    try:
        start(AFTER)
        wrong = [said for said in (finish() for finish in started) if said]
        time.sleep(2.5)  # longer than what watches a rank's start waits before it ends others
        wrong += [f"a bystander: {each.returncode}" for each in bystanders if each.poll() is not None]
    finally:
        for each in bystanders:
            each.kill()
            each.wait()
    everyone = comm.all_gather_object(wrong)
    if comm.rank == 0:
        sys.stdout.write(f"{json.dumps(everyone)}\n")


if __name__ == "__main__":
    main()
