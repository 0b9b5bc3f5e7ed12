"""The Synchronizer: every rank starts from root's parameters and steps with the mean of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from clcomm.adapters import replica_of
from clcomm.agreement import CHECKS, all_alike, digest, require_agreement
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError, ClcommError, NonFiniteError
from clcomm.layout import Bucket, FlatLayout
from clcomm.replica import FlatArrays, Replica
from clcomm.units import parse_size

#: Labels under which the Communicator's stats count our traffic.
GRADIENTS, PARAMETERS = "gradients", "parameters"


class Synchronizer:
    """Keeps one model's replicas alike, on the ranks of a Communicator.

    comm: the ranks. use_bucketing, bucket_size: as the Communicator's, unless given here.
    check_replicas_every: compare the replicas' hashes after every so many synchronisations; 0: after broadcasts only.
    check_finite: raise NonFiniteError on every rank when a mean gradient holds NaN or Inf.

    A model is anything `clcomm.adapters` knows: of this package's engine, of PyTorch, of netcl, or with NumPy arrays.
    Its parameters' names, shapes and dtypes, and the bucket plan, are compared over the ranks before the first
    traffic; MismatchError with the same text is raised on every rank where they differ.
    """

    def __init__(
        self,
        comm: Communicator,
        use_bucketing: bool | None = None,
        *,
        bucket_size: int | str | None = None,
        check_replicas_every: int = 0,
        check_finite: bool = False,
    ):
        if not isinstance(check_replicas_every, int) or check_replicas_every < 0:
            raise ArgumentError(
                f"check_replicas_every: expected a number of steps, 0 for never, got {check_replicas_every!r}"
            )
        self.comm = comm
        self.use_bucketing = comm.use_bucketing if use_bucketing is None else use_bucketing
        self.bucket_size = comm.bucket_size if bucket_size is None else parse_size(bucket_size)
        self.check_replicas_every = check_replicas_every
        self.check_finite = check_finite
        self._spaces: dict[int, _SharedSpace] = {}
        self._paused = 0

    def broadcast_parameters(self, model: Any, root: int = 0) -> None:
        """Give every rank root's parameters, in one broadcast, and check that the replicas are alike."""
        space = self._space(model)
        space.replica.pull_parameters()
        self.comm.broadcast(space.arrays.params, root, label=PARAMETERS, nbytes=space.layout.nbytes)
        space.replica.push_parameters()
        self._broadcast_extra_state(space, root)
        self.check_replicas(model)

    def sync_gradients(self, model: Any, use_bucketing: bool | None = None) -> None:
        """Replace each gradient by its mean over the ranks; a rank without a gradient counts as zero.

        Buckets of up to `bucket_size` bytes are reduced at a time, single tensors where `use_bucketing` is false; the
        resulting bits are the same. Within `no_sync()` nothing happens. Raises NonFiniteError where asked to check.
        """
        if self._paused:
            return
        space = self._space(model)
        for prepared in self._plan(space, use_bucketing):
            space.replica.pull_gradients(prepared.bucket)
            prepared.reduce()
            if self.check_finite and not np.isfinite(prepared.mean).all():
                self._raise_non_finite(space, prepared.bucket)
            space.replica.push_gradients(prepared.bucket)
        space.synchronisations += 1
        if self.check_replicas_every and space.synchronisations % self.check_replicas_every == 0:
            self.check_replicas(model)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate: within this block `sync_gradients` does nothing, also after an exception."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def check_replicas(self, model: Any) -> None:
        """Raise on every rank, if the parameters' bits differ between ranks, naming where."""
        space = self._space(model)
        space.replica.pull_parameters()
        own = np.frombuffer(digest(space.arrays.params), np.uint8)
        if all_alike(self.comm.all_gather(own, label=CHECKS)):
            return
        views = ((slot.name, space.layout.view(space.arrays.params, slot.name)) for slot in space.layout.slots)
        hashes = [f"{name}: {digest(view).hex()}" for name, view in views]
        require_agreement(self.comm, "parameter bits", hashes, "broadcast the parameters again and look for the cause")

    def bucket_plan(self, model: Any, use_bucketing: bool | None = None) -> tuple[Bucket, ...]:
        """Return the buckets that `sync_gradients` reduces, in order; collective the first time."""
        return tuple(prepared.bucket for prepared in self._plan(self._space(model), use_bucketing))

    def get_communication_stats(self) -> dict[str, float]:
        """Return this rank's gradient traffic: all-reduce calls, their bytes, and the mean of these."""
        total = self.comm.stats.total("all_reduce", GRADIENTS)
        return {
            "total_allreduce_calls": total["calls"],
            "total_bytes_sent": total["bytes"],
            "average_bytes_per_call": total["average_bytes_per_call"],
        }

    # --- parts ---

    def _space(self, model: Any) -> _SharedSpace:
        space = self._spaces.get(id(model))
        if space is None:
            space = self._spaces[id(model)] = _SharedSpace(self.comm, model)
        return space

    def _plan(self, space: _SharedSpace, use_bucketing: bool | None) -> tuple[_PreparedBucket, ...]:
        size = self.bucket_size if (self.use_bucketing if use_bucketing is None else use_bucketing) else None
        plan = space.plans.get(size)
        if plan is None:
            buckets = space.layout.buckets(size)
            lines = ["per tensor" if size is None else f"bucket_size {size}"]
            lines += [f"bucket {b.index}: {', '.join(s.name for s in b.slots)}" for b in buckets]
            require_agreement(self.comm, "bucket plan", lines, "give every rank the same bucket_size")
            plan = space.plans[size] = tuple(_PreparedBucket.of(self.comm, space.arrays, bucket) for bucket in buckets)
        return plan

    def _raise_non_finite(self, space: _SharedSpace, bucket: Bucket) -> NoReturn:
        # The mean has the same bits on every rank, so all of them come here together.
        own_find = _first_non_finite(space.layout, space.arrays.grads, bucket)
        mean_find = _first_non_finite(space.layout, space.arrays.reduced, bucket)
        origins = self.comm.all_gather_object(own_find, label=CHECKS)
        raise NonFiniteError(_describe_non_finite(origins, mean_find))

    def _broadcast_extra_state(self, space: _SharedSpace, root: int) -> None:
        state = space.replica.extra_state()
        lines = [f"{name} {array.shape} {array.dtype}" for name, array in state.items()]
        require_agreement(self.comm, "buffers and frozen parameters", lines, "build the same model on every rank")
        for array in state.values():
            self.comm.broadcast(array, root, label=PARAMETERS)
        if state:
            space.replica.load_extra_state(state)


@dataclass(frozen=True)
class _PreparedBucket:
    """A bucket, what reduces it, and where its mean appears."""

    bucket: Bucket
    reduce: Callable[[], None]
    mean: np.ndarray

    @classmethod
    def of(cls, comm: Communicator, arrays: FlatArrays, bucket: Bucket) -> _PreparedBucket:
        own = arrays.grads[bucket.start : bucket.stop].view(bucket.dtype)
        mean = arrays.reduced[bucket.start : bucket.stop].view(bucket.dtype)
        return cls(bucket, comm.all_reduce_init(own, "mean", out=mean, label=GRADIENTS, nbytes=bucket.nbytes), mean)


class _SharedSpace:
    """A model's replica with its flat space in the Communicator's memory."""

    def __init__(self, comm: Communicator, model: Any):
        self.model = model  # kept, so that no other model can get its id
        self.replica = self._replica_on_all(comm, model)
        self.layout = FlatLayout(self.replica.specs)
        span = self.layout.span
        grads = comm.allocate(span)
        reduced = grads if comm.size == 1 else comm.allocate_common(span)
        self.arrays = FlatArrays(comm.allocate(span), grads, reduced)
        self.replica.attach(self.layout, self.arrays)
        self.plans: dict[int | None, tuple[_PreparedBucket, ...]] = {}
        self.synchronisations = 0

    @staticmethod
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


def _first_non_finite(layout: FlatLayout, gradients: np.ndarray, bucket: Bucket) -> tuple[str, int, int] | None:
    """Return (parameter, NaNs, Infs) of the first gradient in a bucket that is not finite, if any."""
    for slot in bucket.slots:
        gradient = layout.view(gradients, slot.name)
        nans, infs = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        if nans or infs:
            return slot.name, nans, infs
    return None


def _describe_non_finite(origins: list[tuple[str, int, int] | None], mean: tuple[str, int, int] | None) -> str:
    found = [
        f"{name!r} has {nans} NaN and {infs} Inf on rank {rank}"
        for rank, origin in enumerate(origins)
        if origin is not None
        for name, nans, infs in [origin]
    ]
    if not found and mean is not None:
        found = [f"{mean[0]!r} overflows when the ranks' finite gradients are added"]
    return (
        f"gradient: expected finite numbers, but {', '.join(found)}; "
        "lower the learning rate or look at that rank's batch"
    )
