"""A replica group of one process under torchft, as in its README: Manager, DistributedDataParallel, Optimizer, gloo.

Its batches follow the step number of its Manager, so that it loses no more samples than those of ranks that are away.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.kills import task
from benchmarks.kills.task import Events, Task

#: The number of this replica group, and how many there are, as torchft's examples have them.
GROUP, GROUPS = "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS"


def main() -> None:
    given, rank, ranks = Task.given(), int(os.environ[GROUP]), int(os.environ[GROUPS])
    model = task.network()
    inner = task.adam(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"kills_{rank}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    each = task.SHARDS // ranks
    events = Events(given, rank)
    events.note(task.BEGINS, 0)
    before_s = time.monotonic()
    while manager.current_step() < given.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        before_s = given.compute_since(before_s)
        inputs, targets = task.batch(step, range(rank * each, (rank + 1) * each))
        cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        if manager.current_step() > step:
            events.note(task.STEP, manager.current_step(), manager.num_participants() * each * task.SAMPLES)
    events.note(task.ENDS, manager.current_step(), digest=task.digest(model, inner))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
