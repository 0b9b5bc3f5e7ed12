"""The Synchronizer: every rank starts from root's parameters and steps with the mean of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from clcomm.agreement import require_agreement
from clcomm.averaging import Averaging
from clcomm.bucket_plan import GRADIENTS, hook_name
from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression import CommHook, StatefulHook, between_hosts, parse_compression
from clcomm.decision import Decision
from clcomm.divergence import ReplicaGuard
from clcomm.errors import ArgumentError
from clcomm.join import turnout, weight_of
from clcomm.shared_space import SharedSpace

#: The label under which the Communicator's stats count parameters.
PARAMETERS = "parameters"


class Synchronizer:
    """Keeps one model's replicas alike, on the ranks of a Communicator.

    comm: the ranks. use_bucketing, bucket_size: as the Communicator's, unless given here. bucket_size "auto" tries a
        few sizes during the first steps, which changes no result, and keeps the fastest; `decisions()` tells.
    first_bucket_size: that of the first bucket, which can be smaller so that communication begins early.
    split_tensors: cut tensors larger than `bucket_size` into several buckets; else each has one of its own.
    overlap: begin a bucket as soon as backward has completed it; the results are the same. "auto": if that turns out
        to be faster in the first steps; `decisions()` tells. Between a backward and its `sync_gradients` nothing may
        change the gradients then, all but the last micro-batch of a step belong into `no_sync()`, and every rank runs
        the same collectives.
    check_replicas_every: compare the replicas' hashes after every so many synchronisations; 0: after broadcasts only.
    on_divergence: where they differ, "raise" MismatchError on every rank, or "rebroadcast" the parameters that most
        ranks have (of equally many the lowest rank's), and the state of the optimizer that `attach_optimizer` named.
    check_finite: raise NonFiniteError on every rank when a mean gradient holds NaN or Inf.
    compression: "none", "fp16", "bf16", "int8", "topk:SHARE" or "powersgd:RANK": what gradients travel as; all but the
        first change them, the last three with error feedback. See `register_comm_hook` for one's own.

    A model is anything `clcomm.adapters` knows: of this package's engine, of PyTorch, of netcl, or with NumPy arrays.
    Its parameters' names, shapes and dtypes, and the bucket plan, are compared over the ranks before the first
    traffic, and so are the settings; MismatchError with the same text is raised on every rank where they differ.
    """

    def __init__(
        self,
        comm: Communicator,
        use_bucketing: bool | None = None,
        *,
        bucket_size: int | str | None = None,
        first_bucket_size: int | str | None = None,
        split_tensors: bool = False,
        overlap: bool | str = False,
        check_replicas_every: int = 0,
        on_divergence: str = "raise",
        check_finite: bool = False,
        compression: str = "none",
    ):
        self.comm = comm
        self.guard = ReplicaGuard(comm, check_replicas_every, on_divergence)
        self.check_finite = check_finite
        self._averaging = Averaging(
            comm, use_bucketing, bucket_size, first_bucket_size, split_tensors, overlap, self._is_paused
        )
        self._spaces: dict[int, SharedSpace] = {}
        self._left: list[tuple[Any, Any]] = []  # flat spaces, each with the DistributedOptimizer that reduces it
        self._paused = 0
        self._joined = False
        self.register_comm_hook(parse_compression(compression))

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "Synchronizer: expected to stay in its process, got one to be copied or pickled; make one for each model"
        )

    @property
    def use_bucketing(self) -> bool:
        """Whether gradients are reduced in buckets where a call does not say; settable between steps, on all ranks."""
        return self._averaging.use_bucketing

    @use_bucketing.setter
    def use_bucketing(self, use_bucketing: bool) -> None:
        self._averaging.use_bucketing = bool(use_bucketing)
        for space in self._spaces.values():
            space.runs.clear()

    @property
    def bucket_size(self) -> int:
        """Bytes of a bucket at the most, as given or, with "auto", as chosen; settable between steps."""
        return self._averaging.bucket_size

    @bucket_size.setter
    def bucket_size(self, nbytes: int | str) -> None:
        self._averaging.set_bucket_size(nbytes)
        for space in self._spaces.values():
            space.runs.clear()

    def broadcast_parameters(self, model: Any, root: int = 0) -> None:
        """Give every rank root's parameters, in one broadcast, and check that the replicas are alike."""
        space = self._space(model)
        self._require_unchanged(space)
        space.replica.pull_parameters()
        self.comm.broadcast(space.arrays.params, root, label=PARAMETERS, nbytes=space.layout.nbytes)
        space.replica.push_parameters()
        self._broadcast_extra_state(space, root)
        self.guard.require_alike(space)

    def attach_optimizer(self, model: Any, optimizer: Any) -> None:
        """Name the optimizer whose `state_dict` goes along where a replica that differs gets another's parameters."""
        self.guard.attach(model, optimizer)

    def sync_gradients(self, model: Any, use_bucketing: bool | None = None, *, samples: float | None = None) -> None:
        """Replace each gradient by its mean over the ranks; a rank without a gradient counts as zero.

        Buckets of up to `bucket_size` bytes are reduced at a time, single tensors where `use_bucketing` is false; the
        resulting bits are the same. samples: how many this rank's gradient is the mean of; the result is then the mean
        over all ranks' samples instead. Every rank gives its number, or none does.

        Within `no_sync()` nothing happens, nor where a DistributedOptimizer reduces the model's gradients in its step.
        Raises NonFiniteError where asked to check.
        """
        if self._paused:
            return
        if samples is not None:
            self._refuse_overlap()
            self._synchronise(model, use_bucketing, weight_of(self.comm, samples))
        elif self._joined:
            raise ArgumentError("samples: expected this rank's number of samples within join(), got None")
        else:
            self._synchronise(model, use_bucketing, 1.0)

    def _refuse_overlap(self) -> None:
        """Rule overlap out, before it was used."""
        used = any(space.overlap is not None and space.overlap.overlap is not None for space in self._spaces.values())
        if used or self._averaging.overlap is True:
            raise ArgumentError(
                "samples: expected None with overlap, where gradients are on their way before they could be weighed; "
                "use overlap=False"
            )
        self._averaging.overlap = False

    def _synchronise(self, model: Any, use_bucketing: bool | None, weight: float) -> None:
        space = self._space(model)
        self._require_unchanged(space)
        reducer = self.sharded_update_of(model) if self._left else None
        if reducer is not None:
            reducer.expect_step(weight)
            return
        self._averaging.run_of(space, use_bucketing)(self.check_finite, weight)
        self.count_synchronisation(space)

    @contextmanager
    def join(self, model: Any, step: Callable[[], object]) -> Iterator[None]:
        """Let ranks run out of batches at different steps: `sync_gradients(model, samples=...)` within this block.

        A rank that leaves the block takes part in the others' synchronisations without samples of its own, each
        followed by `step()`, until all ranks have left. step: what the loop does after `sync_gradients`, such as
        clipping, the optimizer's step and its `zero_grad`; so the replicas stay alike. After an exception nothing is
        waited for. The idea of PyTorch's Join context manager.
        """
        if self._joined:
            raise ArgumentError("join: expected to be entered once, got a join() within another")
        self._joined = True
        try:
            yield
            while turnout(self.comm, None).ranks:
                self._synchronise(model, None, 0.0)
                step()
        finally:
            self._joined = False

    def count_synchronisation(self, space: SharedSpace) -> None:
        """Note that a model's gradients were reduced, and compare the replicas where it is time for that."""
        space.synchronisations += 1
        if space.order.is_open and space.order.close():
            space.runs.clear()  # the buckets may be others from now on
        if self.guard.is_due(space):
            self.check_replicas(space.model)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate: within this block `sync_gradients` does nothing, also after an exception."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            for space in self._spaces.values():
                if space.overlap is not None:
                    space.overlap.expect_all()

    def check_replicas(self, model: Any) -> None:
        """Compare the parameters' bits over the ranks; where they differ do what `on_divergence` says. Collective.

        With a DistributedOptimizer its settings too: MismatchError on every rank where they differ.
        """
        sharded = self.sharded_update_of(model)
        if sharded is not None:
            sharded.require_same_settings()
        self.guard.check(self._space(model), lambda root: self.broadcast_parameters(model, root))

    def bucket_plan(self, model: Any, use_bucketing: bool | None = None) -> tuple[Bucket, ...]:
        """Return the buckets that `sync_gradients` reduces, in order; collective the first time.

        A DistributedOptimizer reduces all gradients at once: one bucket, whatever the settings.
        """
        space = self._space(model)
        if self.sharded_update_of(model) is not None:
            return space.layout.buckets(space.layout.span)
        return self._averaging.plan(space, use_bucketing).buckets

    def reductions(self, model: Any, use_bucketing: bool | None = None) -> Callable[[], None]:
        """Return what reduces the buckets of `bucket_plan` and does nothing else: to measure communication alone.

        Each call reduces what backward left last, and changes no gradient between a `sync_gradients` and the next
        backward. Collective; so is each call. Calls are counted, and what a lossy compression keeps goes on. Raises
        ArgumentError where a DistributedOptimizer reduces the gradients.
        """
        if self.sharded_update_of(model) is not None:
            raise ArgumentError("model: expected one whose gradients are reduced in buckets, got a sharded update's")
        return self._averaging.plan(self._space(model), use_bucketing).reduce

    def register_comm_hook(self, hook: CommHook | None) -> None:
        """Let `hook(gradient, comm, out, bucket)` reduce each floating bucket from now on; None: a plain all-reduce.

        `clcomm.compression` tells what a hook is given and has to do. Every rank registers the same one. Raises
        ArgumentError for one that cannot be called, and where a DistributedOptimizer reduces gradients, as it has no
        buckets to give a hook.
        """
        if hook is not None and self._left:
            raise ArgumentError(
                "hook: expected None with a DistributedOptimizer, which reduces without buckets, "
                f"got {hook_name(hook)}; use one of the two"
            )
        self._averaging.use_hook(hook)
        for space in self._spaces.values():
            space.forget_plans()

    @property
    def compression(self) -> str:
        """What reduces the gradients, in words; "none" is a plain all-reduce."""
        return hook_name(self._averaging.hook)

    def decisions(self) -> tuple[Decision, ...]:
        """Return what was chosen by measuring, with the evidence."""
        return tuple(self._averaging.decisions)

    def state_dict(self, model: Any) -> dict[str, np.ndarray]:
        """Return what compression keeps on this rank from step to step, by name; nothing where it keeps nothing.

        Compression between hosts keeps it on the first rank of each.
        """
        hook = self._averaging.hook
        if not isinstance(hook, StatefulHook):
            return {}
        flat = self._kept_for(model)
        return {} if flat is None else hook.state_of(flat)

    def load_state_dict(self, model: Any, state: Mapping[str, np.ndarray]) -> None:
        """Go on from this rank's `state_dict`; nothing in it: from the start. Collective for a model not seen yet.

        Raises ArgumentError, changing nothing, for another model's.
        """
        hook = self._averaging.hook
        if isinstance(hook, StatefulHook):
            self.check_state_dict(model, state)
            flat = self._kept_for(model)
            if state and flat is not None:
                hook.load_state_of(flat, dict(state))

    def check_state_dict(self, model: Any, state: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless a rank's `state_dict` may be this. Collective for a model not seen yet."""
        check, layout = getattr(self._averaging.hook, "check_state", None), self._space(model).layout
        if state and check is not None:
            check(layout, state)

    def leave_reduction(self, flat_space: Any, reducer: Any) -> None:
        """Let a DistributedOptimizer reduce the gradients of an engine's flat space: `sync_gradients` leaves them."""
        if self._averaging.overlap is True:
            raise ArgumentError("sync: expected one without overlap for a sharded update, got overlap=True")
        self._left = [(left, other) for left, other in self._left if left is not flat_space]
        self._left.append((flat_space, reducer))
        self._averaging.note_no_buckets()
        for space in self._spaces.values():
            if getattr(space.replica, "flat_space", None) is flat_space:
                space.stop_overlap()

    def sharded_update_of(self, model: Any) -> Any:
        """Return the DistributedOptimizer that reduces a model's gradients, None where `sync_gradients` does."""
        flat_space = getattr(self._space(model).replica, "flat_space", None)
        return next((reducer for left, reducer in self._left if left is flat_space), None)

    def space_for(self, model: Any) -> SharedSpace:
        """Return what is kept for a model; collective the first time."""
        return self._space(model)

    def space_of(self, flat_space: Any) -> SharedSpace:
        """Return what is kept for the model of an engine's flat space; ArgumentError for a model not seen yet."""
        for space in self._spaces.values():
            if getattr(space.replica, "flat_space", None) is flat_space:
                return space
        raise ArgumentError(
            "optimizer: expected the parameters of a model that this Synchronizer knows; "
            "call broadcast_parameters(model) first"
        )

    def get_communication_stats(self) -> dict[str, float]:
        """Return this rank's gradient traffic: all-reduce calls, their bytes, and the mean of these."""
        total = self.comm.stats.total("all_reduce", GRADIENTS)
        return {
            "total_allreduce_calls": total["calls"],
            "total_bytes_sent": total["bytes"],
            "average_bytes_per_call": total["average_bytes_per_call"],
        }

    # --- parts ---

    def _is_paused(self) -> bool:
        return self._paused > 0

    def _require_unchanged(self, space: SharedSpace) -> None:
        """Raise ArgumentError, on every rank, where any rank's model has other parameters than at first.

        With overlap on the rank alone: the others wait for buckets that have begun, and meet no one.
        """
        try:
            space.replica.require_unchanged()
        except ArgumentError as error:
            if space.overlap is not None:
                raise
            self.comm.refuse(str(error))

    def _kept_for(self, model: Any) -> np.ndarray | None:
        """Return the flat gradients that a hook is given parts of; None where it is never called on this rank."""
        arrays = self._space(model).arrays
        if not between_hosts.is_for(self.comm, self._averaging.hook, arrays.grads, arrays.reduced):
            return arrays.grads
        return None if self.comm.local_rank else arrays.reduced

    def _space(self, model: Any) -> SharedSpace:
        space = self._spaces.get(id(model))
        if space is None:
            space = SharedSpace(self.comm, model, self._is_paused)
            require_agreement(self.comm, "Synchronizer", self._settings(), "give every rank the same settings")
            self._spaces[id(model)] = space
        space.take_over()
        return space

    def _settings(self) -> list[str]:
        return [
            f"overlap {self._averaging.overlap}",
            f"check_replicas_every {self.guard.every}",
            f"on_divergence {self.guard.on_divergence}",
            f"check_finite {self.check_finite}",
        ]

    def _broadcast_extra_state(self, space: SharedSpace, root: int) -> None:
        state = space.replica.extra_state()
        lines = [f"{name} {array.shape} {array.dtype}" for name, array in state.items()]
        require_agreement(self.comm, "buffers and frozen parameters", lines, "build the same model on every rank")
        for array in state.values():
            self.comm.broadcast(array, root, label=PARAMETERS)
        if state:
            space.replica.load_extra_state(state)
