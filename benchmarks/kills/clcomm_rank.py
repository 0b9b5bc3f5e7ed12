"""A rank under `clcomm run --min-ranks`: a PyTorch model with logical shards, and copies of its state in memory."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.kills import task
from benchmarks.kills.task import Events, Task
from clcomm import Communicator, Synchronizer
from clcomm.comm.watch import note_step, run
from clcomm.jobs.checkpoint import Checkpoint
from clcomm.jobs.checkpoint.memory import MemoryCopies


def main() -> None:
    given, comm = Task.given(), Communicator()
    model = task.network()
    optimizer = task.adam(model)
    sync = Synchronizer(comm, shards=task.SHARDS)
    assert sync.shards is not None
    sync.broadcast_parameters(model)  # once before these ranks' turn, as the first one takes most of a second
    copies = MemoryCopies(comm)
    copy = copies.newest()
    first = int(copy.facts["step"]) if copy is not None else 0
    if copy is not None:
        load(copy.arrays, model, optimizer)
        sync.broadcast_parameters(model)
    events = Events(given, comm.rank)
    events.note(task.BEGINS, first)
    before_s = time.monotonic()
    for step in range(first, given.steps):
        note_step(step + 1)
        before_s = given.compute_since(before_s)
        for shard in sync.shards.own:
            with sync.shard(model, shard):
                inputs, targets = task.batch(step, range(shard, shard + 1))
                cross_entropy(model(inputs), targets).backward()
        sync.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        events.note(task.STEP, step + 1, task.STEP_SAMPLES)
        if copies.is_due(step + 1):
            copied_s = time.monotonic()
            state = Checkpoint(task.state_of(model, optimizer), {"step": step + 1})
            if copies.save(state, step + 1, copied_s):
                return
    copies.wait()
    events.note(task.ENDS, given.steps, digest=task.digest(model, optimizer))


def load(arrays: dict[str, np.ndarray], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a copied state."""
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    model.load_state_dict({name: tensors[f"parameter/{name}"] for name, _ in model.named_parameters()})
    state = optimizer.state_dict()
    for number in state["param_groups"][0]["params"]:
        state["state"][number] = {name: tensors[f"{name}/{number}"] for name in ("step", "exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict(state)


if __name__ == "__main__":
    run(main)
