"""How many bytes of a model each rank will have, for --summary."""

from __future__ import annotations

from clcomm.base.flat_space.layout import ShardPlan
from clcomm.base.flat_space.memory import MemoryUse
from clcomm.sync.synchronizer import Synchronizer


def expected_memory(sync: Synchronizer, model: object, state_buffers: int) -> MemoryUse | None:
    """Return the bytes that a rank will have, None for other libraries' models; collective the first time.

    state_buffers: of the optimizer's state, each as large as the parameters are as float32.
    """
    ours, comm, settings = sync.models.of(model), sync.comm, sync.models.settings
    flat, layout = ours.space.flat_space, ours.space.layout
    if flat is None:
        return None
    stage = 0 if ours.sharded_update is None else settings.zero
    sizes = settings.unit_sizes if stage > 1 else (layout.span, None)
    plan, shares = ShardPlan(layout, comm.size, *sizes), comm.shares_memory and comm.hosts == 1
    kind = plan, stage, state_buffers, shares, not flat.is_staged, flat.precision
    use = MemoryUse.expected(*kind, receives=comm.transport == "mpi")
    mean = ours.shard_mean
    return use if mean is None else use._replace(gradients=use.gradients + mean.nbytes)
