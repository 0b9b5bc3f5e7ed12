"""`join`, for ranks without more batches."""

from __future__ import annotations

import gc
import time
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.horovod import joined, world
from clcomm.horovod.gradients import GradientBuckets
from clcomm.horovod.operations import raising_internal_errors
from clcomm.horovod.reduction import known_reductions
from clcomm.horovod.world import global_process_set

#: How long a rank that has joined waits before it looks again what the others do, in seconds.
_PAUSE_S = 1e-4


@world.refused
@raising_internal_errors()
def join(device: int = -1) -> int:
    """Let the other ranks go on without this one, which has no more batches; return the rank that joined last.

    Until all ranks have joined, this one takes part in the steps of their DistributedOptimizers with zeros, and makes
    no steps itself: send the parameters of the rank that joined last to the others afterwards. It contributes nothing
    to their all-reduces, all-gathers, broadcasts and barriers. device: ignored. Collective.

    Raises ArgumentError with Adasum, with a compressor of the program's own, and with several optimizers of which one
    is of a process set.
    """
    comm = world.communicator()
    if comm.size > 1 and not all(each.is_numbered for each in known_reductions.live):
        gc.collect()  # of a process set's and Adasum's that the program has dropped none counts, on every rank
    held = [(each, each.optimizer()) for each in known_reductions.live if each.is_needed and not each.is_replaced]
    reductions = [each for each, optimizer in held if optimizer is not None]  # which `held` keeps
    for reduction in reductions:
        if reduction.buckets is None:
            raise ArgumentError("join: expected op Average or Sum and no compressor of your own, got another")
        if len(reductions) > 1 and not reduction.is_numbered:
            raise ArgumentError("join: expected one DistributedOptimizer, or several of all ranks, got a process set's")
    of_set = next((each.buckets for each in reductions if not each.is_numbered), None)
    only = of_set or known_reductions.followed()
    rounds, empty = _follow(only, is_announced=of_set is None)
    ends = comm.all_gather_object((rounds, empty + (only is not None and only.is_begun)), label="join")
    if only is not None:
        for _ in range(max(begun for _, begun in ends) - empty):
            only.take_part()  # what other ranks that have joined have begun
    for reduction in reductions:
        reduction.start_over()
    global_process_set.some_joined = False
    least = min(ends)[0]
    return max(rank for rank in range(comm.size) if ends[rank][0] == least)


def _follow(only: GradientBuckets | None, is_announced: bool) -> tuple[int, int]:
    """Take part in what the other ranks do until all have joined; return how often, and how often nobody had gradients.

    Args:
        only: the gradients of the program's one optimizer, where ranks that know of no joined one announce no steps.
        is_announced: whether those that know of one do; not those of a process set, as other ranks do not step with it.
    """
    comm, rounds, empty, told = world.communicator(), 0, 0, joined.tell(joined.HAS_JOINED)
    while True:
        try:
            with joined.waiting(comm):
                if only and not (is_announced and global_process_set.some_joined) and _comes_first(only, told):
                    global_process_set.some_joined |= is_announced
                    has_gradients = only.take_part()
                    rounds, empty = rounds + has_gradients, empty + (not has_gradients)
                    continue
                everyone, have_older = told.wait().T.tolist()
        except ArgumentError as error:
            if not joined.is_notice(error):
                raise
            told = joined.tell(joined.HAS_JOINED)
            continue
        found = {each for each in everyone if each != joined.HAS_JOINED}
        if not found:
            return rounds, empty
        rounds += 1
        if found == {joined.OPERATES}:
            joined.take_part(everyone)
        elif len(found) == 1:
            buckets = known_reductions.numbered[found.pop()].buckets
            assert buckets is not None
            for _ in range(1 + any(have_older)):
                buckets.take_part()
        told = joined.tell(joined.HAS_JOINED)


def _comes_first(only: GradientBuckets, told: Any) -> bool:
    """Wait for a step of the other ranks, or for what they say; return whether it is a step."""
    only.begin_without()
    with world.communicator().runner.waiting_for("join"):
        while not told.done():
            if only.is_complete():
                return True
            time.sleep(_PAUSE_S)
    return False
