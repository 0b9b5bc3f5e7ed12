"""A small training job with a fault, which planted.py causes. Every second of its 8 steps is saved."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.comm.watch import endings
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.sync.divergence import flip_bit
from tests.faults.cases import IN_KERNEL
from tests.faults.planted import (
    ACTS,
    DISKS,
    FAULT,
    PLACE,
    at,
    disagree,
    fill,
    is_victim,
    stamp,
    while_writing,
    within,
)
from training.checkpoint_series import CheckpointSeries, is_there, load_newest

PATH = Path(os.environ["CLCOMM_TEST_DIR"]) / "run.npz"
STEPS, FAULTY_STEP = 8, 5


def use_kernels(comm: Communicator) -> None:
    """Build the kernels of a small computation with the other ranks, and check their results."""
    from clcomm.engine import Tensor, default_device
    from training.engines.build_together import build_together
    from training.engines.rehearsal import Rehearsal

    left, right = (np.arange(12, dtype=np.float32).reshape(shape) for shape in ((3, 4), (4, 3)))
    device = default_device()

    def rehearse() -> Rehearsal:
        rehearsal = Rehearsal(device)
        (Tensor(left, rehearsal) @ Tensor(right, rehearsal)).relu()
        return rehearsal

    build_together(comm, device, rehearse, "faults")
    assert np.array_equal((Tensor(left, device) @ Tensor(right, device)).relu().numpy(), left @ right)


def reduce_in_one_kernel(comm: Communicator) -> None:
    """Sum float32 with a prepared all-reduce that is one kernel of each rank."""
    from clcomm.engine.device import Device
    from clcomm.engine.fold import DeviceFold

    own, total = comm.allocate(400).view(np.float32), comm.allocate_common(400).view(np.float32)
    device = Device.select("cpu", local_rank=comm.local_rank, local_size=comm.local_size, cores=1)
    comm.fold_with(DeviceFold.on(device))
    reduce = comm.all_reduce_init(own, "sum", out=total, label="one kernel")
    assert comm.size == 1 or getattr(reduce, "__qualname__", "") == "OneKernelAllReduce.run"
    for turn in range(20):
        if turn == 10:
            within(IN_KERNEL, comm)
        if turn == 11:
            disagree(IN_KERNEL, comm)
        own[:] = turn + comm.rank
        reduce()
        assert (total == comm.size * turn + sum(range(comm.size))).all()
        comm.barrier()  # before anyone's next sum


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
        flip_bit(self.parts[1][1].data, 8 * (8 * 3 + 2) + 4)


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
        if PLACE == IN_KERNEL:
            reduce_in_one_kernel(comm)
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
