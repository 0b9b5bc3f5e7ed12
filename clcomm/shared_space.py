"""A model's flat space in the Communicator's memory, as the Synchronizer keeps it for each model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from clcomm.adapters import replica_of
from clcomm.agreement import require_agreement
from clcomm.communicator import Communicator
from clcomm.completion_order import CompletionOrder
from clcomm.errors import ClcommError
from clcomm.layout import FlatLayout
from clcomm.replica import FlatArrays, Replica

#: The space that was used last, by the id of its model: only its Synchronizer follows that model's backward.
_latest: weakref.WeakValueDictionary[int, SharedSpace] = weakref.WeakValueDictionary()


class SharedSpace:
    """A model's replica with its flat space in the Communicator's memory; making one is collective.

    arrays: the flat arrays, of `layout.span` bytes. padded: the same memory up to equal shards for all ranks.
    is_paused: whether gradients are to accumulate, now.
    MismatchError is raised on every rank where the ranks' parameters differ in name, shape or dtype.
    """

    def __init__(self, comm: Communicator, model: Any, is_paused: Callable[[], bool] = lambda: False):
        self.model = model  # kept, so that no other model can get its id
        self._claim()
        self.replica = _replica_on_all(comm, model)
        if self.replica.fold is not None:
            comm.fold_with(self.replica.fold)
        self.layout = FlatLayout(self.replica.specs)
        self.shard_nbytes = self.layout.shard_nbytes(comm.size)
        whole = comm.size * self.shard_nbytes
        grads = comm.allocate(whole)
        reduced = grads if comm.size == 1 else comm.allocate_common(whole)
        self.move(FlatArrays(comm.allocate(whole), grads, reduced))
        self.plans: dict[Any, Any] = {}
        self.runs: dict[Any, Any] = {}  # what averages the gradients, until something changes
        self.tunings: dict[bool, Any] = {}  # AutoBuckets, where the bucket size is to be found: False without overlap
        self.synchronisations = 0
        self.overlap: Any = None  # the OverlapChoice, if any
        self.order = CompletionOrder(comm, self.replica, is_paused)

    def take_over(self) -> None:
        """Let the model live here again, where another Synchronizer was given it since; then that follows no more."""
        if _latest.get(id(self.model)) is not self:
            self._claim()
            self.replica.attach(self.layout, self.arrays)

    def _claim(self) -> None:
        other = _latest.get(id(self.model))
        if other is not None:
            other.stop_overlap()
        _latest[id(self.model)] = self

    def forget_plans(self) -> None:
        """Make bucket plans anew, with overlap and what is chosen of it, at the next synchronisation."""
        self.plans.clear()
        self.runs.clear()
        self.stop_overlap()

    def stop_overlap(self) -> None:
        """Follow the model's backward no more."""
        if self.overlap is not None:
            self.overlap.close()

    def move(self, padded: FlatArrays) -> None:
        """Let the flat space live in other memory, as large as `padded`; its values are kept."""
        span = self.layout.span
        self.padded = padded
        self.arrays = FlatArrays(padded.params[:span], padded.grads[:span], padded.reduced[:span])
        self.replica.attach(self.layout, self.arrays)


def _replica_on_all(comm: Communicator, model: Any) -> Replica:
    """Return the model's replica after all ranks found theirs alike; a refusal on one rank is an error on all."""
    refusal = None
    try:
        replica = replica_of(model)
        lines = [f"{spec.name} {spec.shape} {spec.dtype}" for spec in replica.specs]
    except ClcommError as error:
        refusal, lines = error, [str(error)]
    require_agreement(comm, "parameters", lines, "build the same model on every rank")
    if refusal is not None:
        raise refusal
    return replica
