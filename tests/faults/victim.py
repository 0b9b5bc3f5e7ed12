"""A small training job with a fault: CLCOMM_TEST_FAULT=FAULT:PLACE:RANK.

Places: "start-up" before the rank has a Communicator, "forward" in step 5, "collective" while it reduces step 5's
gradients, "checkpoint" while step 6 is saved, "exit" after the last step, "end" after the last collective. Every second
of the 8 steps is saved.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from clcomm import Communicator, Synchronizer, checkpoint
from clcomm.checkpoint import Checkpoint
from clcomm.checkpoint_series import CheckpointSeries, is_there, load_newest
from clcomm.job import endings

FAULT, PLACE, RANK = os.environ["CLCOMM_TEST_FAULT"].split(":")
PATH = Path(os.environ["CLCOMM_TEST_DIR"]) / "run.npz"
STEPS, FAULTY_STEP = 8, 5
#: Time from the begin of a wait to the signal, and the delay of the rank that is waited for.
INTO_S, WAIT_S = 0.2, 0.8
_own_rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def is_victim() -> bool:
    """Return whether the fault happens on this rank."""
    return _own_rank == RANK


def stamp() -> None:
    """Print the time of the fault for the harness."""
    sys.stderr.write(f"failing at {time.monotonic():.3f}\n")
    sys.stderr.flush()


def fail() -> None:
    raise RuntimeError("planted")


def crash() -> None:
    ctypes.string_at(0)


def jump() -> None:
    """Make this process's wall clock jump at each call: an hour ahead, then a day back, in turn."""
    real, asked = time.time, []

    def jumped() -> float:
        asked.append(None)
        return real() + (3600 if len(asked) % 2 else -86400)

    time.time = jumped


def in_thread() -> None:
    threading.Thread(target=fail).start()
    time.sleep(30)  # the main thread waits for the other one's work


def send(number: int) -> Callable[[], None]:
    def to_this_process() -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    return to_this_process


def processes_of_the_job() -> list[int]:
    """Return the job's processes: launcher, proxies, ranks and their children."""
    mark, found = f"CLCOMM_TEST_ID={os.environ['CLCOMM_TEST_ID']}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "comm").read_text()
            if entry.name.isdigit() and command.startswith(("mpiexec", "hydra", "python")):
                found += [int(entry.name)] * (mark in (entry / "environ").read_bytes().split(b"\0"))
    return found


def launcher() -> int:
    """Return the process of mpiexec."""
    return next(pid for pid in processes_of_the_job() if Path(f"/proc/{pid}/comm").read_text().startswith("mpiexec"))


def send_all(number: int, times: int = 1) -> None:
    """Send a signal to every process of the job, as a service manager does."""
    for turn in range(times):
        time.sleep(0.05 * turn)
        for pid in processes_of_the_job():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def stay() -> None:
    """Keep this process alive after its program has ended."""
    threading.Thread(target=time.sleep, args=(60,)).start()


#: Signals to more processes than this rank's.
GROUP_SIGNALS: dict[str, Callable[[], Any]] = {
    f"{signal.Signals(number).name} to {whom}": act
    for number in (signal.SIGTERM, signal.SIGINT)
    for whom, act in (
        ("all", partial(send_all, number)),
        ("all twice", partial(send_all, number, 2)),
        ("mpiexec", lambda number=number: os.kill(launcher(), number)),
    )
}


def then_wait(act: Callable[[], Any]) -> Callable[[], None]:
    def act_and_wait() -> None:
        act()
        time.sleep(30)

    return act_and_wait


#: The action of each fault.
ACTS: dict[str, Callable[[], Any]] = {
    "exception": fail,
    "exception in a thread": in_thread,
    "sys.exit": lambda: sys.exit(5),
    "os._exit": lambda: os._exit(7),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": send(signal.SIGKILL),
    "SIGSEGV": crash,
    "SIGTERM": send(signal.SIGTERM),
    "sys.exit, plain script": lambda: sys.exit(5),
    "SIGTERM, plain script": send(signal.SIGTERM),
    "SIGINT": send(signal.SIGINT),
    "SIGSTOP": send(signal.SIGSTOP),
    "slow rank": lambda: time.sleep(1.5),
    "clock jump": jump,
    "thread that stays": stay,
    "thread that stays, finalized": stay,
    "exit handler that stays": lambda: atexit.register(lambda: time.sleep(60)),
    **{fault: then_wait(act) for fault, act in GROUP_SIGNALS.items()},
}
#: Signals that a rank receives while it waits in a library call.
SIGNALS: dict[str, Callable[[], Any]] = {
    **{
        name: partial(os.kill, os.getpid(), signal.Signals[name])
        for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")
    },
    "SIGTERM, plain script": partial(os.kill, os.getpid(), signal.SIGTERM),
    **GROUP_SIGNALS,
}


def at(place: str) -> None:
    """Trigger the fault of this place."""
    if place != PLACE or FAULT not in ACTS:
        return
    if is_victim() or place == "start-up":  # a rank that has not arrived yet cannot end earlier
        stamp()
    if is_victim():
        ACTS[FAULT]()


def within(place: str, comm: Communicator) -> None:
    """Trigger the fault in the next collective, while this rank waits there for the others."""
    if place != PLACE or FAULT not in ACTS:
        return
    if not is_victim():
        time.sleep(WAIT_S)
    elif FAULT in SIGNALS:
        threading.Thread(target=strike, daemon=True).start()
    else:
        comm.add_observer(Striking(comm))


def strike() -> None:
    time.sleep(INTO_S)
    stamp()
    SIGNALS[FAULT]()


class Striking:
    """An observer that triggers the fault within the collective of which it is notified."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def collective_finished(self, event: Any) -> None:
        self.comm.remove_observer(self)
        stamp()
        ACTS[FAULT]()


def while_writing() -> None:
    """Trigger the fault in the middle of a checkpoint's file."""
    fsync = os.fsync

    def struck(descriptor: int) -> None:
        if not done:
            done.append(True)
            stamp()
            ACTS[FAULT]()
        fsync(descriptor)

    done: list[bool] = []
    checkpoint.os = SimpleNamespace(**{**vars(os), "fsync": struck})  # type: ignore[attr-defined]


def disagree(place: str, comm: Communicator) -> None:
    """Call another operation than the other ranks."""
    if place != PLACE:
        return
    size = 100
    if is_victim() and FAULT in ("mismatched shapes", "mismatched order", "missing call"):
        stamp()
        size += FAULT == "mismatched shapes"
        if FAULT == "mismatched order":
            comm.broadcast(np.zeros(3))
    if not (is_victim() and FAULT == "missing call"):
        comm.all_reduce(np.zeros(size), label="metrics")
    if FAULT == "mismatched order" and not is_victim():
        comm.broadcast(np.zeros(3))


def fill(directory: Path) -> Path:
    """Fill the disk of a directory, which is this job's own; return the file that fills it."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    return filler


def make_read_only(directory: Path) -> None:
    """Make a disk, which is this job's own, read-only, as after a disk error."""
    bind, remount, read_only = 4096, 32, 1  # MS_BIND, MS_REMOUNT, MS_RDONLY of mount(2)
    libc, path = ctypes.CDLL(None, use_errno=True), bytes(directory)
    # A bind mount on itself: files open for writing would prevent a plain remount.
    for source, flags in ((path, bind), (None, bind | remount | read_only)):
        if libc.mount(source, path, None, flags, None):
            raise OSError(ctypes.get_errno(), "not made read-only")


def use_kernels(comm: Communicator) -> None:
    """Build the kernels of a small computation with the other ranks, and check their results."""
    from clcomm.engine import Tensor, default_device
    from clcomm.engine.rehearsal import Rehearsal
    from training.engines.build_together import build_together

    left, right = (np.arange(12, dtype=np.float32).reshape(shape) for shape in ((3, 4), (4, 3)))
    device = default_device()

    def rehearse() -> Rehearsal:
        rehearsal = Rehearsal(device)
        (Tensor(left, rehearsal) @ Tensor(right, rehearsal)).relu()
        return rehearsal

    build_together(comm, device, rehearse, "faults")
    assert np.array_equal((Tensor(left, device) @ Tensor(right, device)).relu().numpy(), left @ right)


#: Faults of the disk for checkpoints.
DISKS = {"disk full": fill, "read-only directory": make_read_only}


class Model:
    """A linear model of 2 x 50 parameters; its gradient depends on rank and step alone."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.parts = [(f"part{i}", SimpleNamespace(data=rng.normal(size=50), grad=None)) for i in range(2)]

    def named_parameters(self) -> list[tuple[str, SimpleNamespace]]:
        return self.parts

    def backward(self, rank: int, step: int) -> None:
        for number, (_, part) in enumerate(self.parts):
            part.grad = np.random.default_rng([rank, step, number]).normal(size=50)
            if FAULT == "NaN" and step == FAULTY_STEP and is_victim() and number == 1:
                stamp()
                part.grad[7] = np.nan

    def flip(self) -> None:
        """Flip one bit of this replica."""
        stamp()
        self.parts[1][1].data.view(np.uint64)[3] ^= np.uint64(1 << 20)


def main() -> None:
    at("start-up")
    comm = Communicator()
    if FAULT == "/dev/shm full" and comm.rank == 0:
        atexit.register(fill(Path("/dev/shm")).unlink)
    comm.barrier()
    if "kernel cache" in FAULT:
        use_kernels(comm)
    sync = Synchronizer(comm, check_replicas_every=1, check_finite=True)
    model, series = Model(), CheckpointSeries(comm, PATH, keep=2)
    disagree("start-up", comm)
    sync.broadcast_parameters(model)
    done = resume(comm, model)
    for step in range(done + 1, STEPS + 1):
        train(comm, sync, model, step)
        if step % 2 == 0:
            save(comm, series, model, step)
    at("exit")
    disagree("exit", comm)
    comm.barrier()
    if comm.rank == 0:
        total = sum(float(np.abs(part.data).sum()) for _, part in model.parts)
        print(f"finished from step {done} with {total!r}")
    if FAULT.endswith("finalized"):
        comm.finalize()
    at("end")


def resume(comm: Communicator, model: Model) -> int:
    if not comm.broadcast_object(is_there(PATH)):
        return 0
    found = load_newest(comm, PATH)[1]
    for name, part in model.parts:
        part.data[...] = found.group("parameter")[name]
    return int(found.facts["step"])


def train(comm: Communicator, sync: Synchronizer, model: Model, step: int) -> None:
    endings.note_step(step)
    faulty = step == FAULTY_STEP
    if faulty:
        at("forward")
        if FAULT == "flipped bit" and PLACE == "forward" and is_victim():
            model.flip()
    model.backward(comm.rank, step)
    if faulty:
        within("collective", comm)
        disagree("collective", comm)
    sync.sync_gradients(model)
    for _, part in model.parts:
        part.data -= 0.1 * part.grad
    if faulty and FAULT == "flipped bit" and PLACE == "collective" and is_victim():
        model.flip()


def save(comm: Communicator, series: CheckpointSeries, model: Model, step: int) -> None:
    if step == FAULTY_STEP + 1:
        if PLACE == "checkpoint" and FAULT == "flipped bit" and is_victim():
            model.flip()
        if PLACE == "checkpoint" and comm.rank == 0 and is_victim() and FAULT in DISKS:
            stamp()
            DISKS[FAULT](PATH.parent)
        if PLACE == "checkpoint" and comm.rank == 0 and is_victim() and FAULT in ACTS:
            while_writing()
        else:
            within("checkpoint", comm)
        disagree("checkpoint", comm)
    state = Checkpoint(facts={"step": step})
    state.add_group("parameter", {name: part.data.copy() for name, part in model.parts})
    series.save(state if comm.rank == 0 else None)
    endings.note_saved(step)


if __name__ == "__main__":
    if FAULT.endswith("plain script"):
        main()
    else:
        endings.run(main)
