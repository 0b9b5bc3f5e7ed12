"""DistributedDataParallel: data-parallel replicas of a model, over the Synchronizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError, no_copy
from clcomm.comm.communicator import Communicator
from clcomm.parallel.mesh import Mesh, ranks_along
from clcomm.sync.agreement import CHECKS, refused, require_agreement
from clcomm.sync.clipping import clip_grad_norm
from clcomm.sync.compression import CommHook
from clcomm.sync.model_sync import averaging_of
from clcomm.sync.sampler import ShardBatches
from clcomm.sync.sharded_steps import ShardedSteps
from clcomm.sync.synchronizer import Synchronizer

#: The name of a mesh's axis of data-parallel ranks, in any case of letters.
DATA_PARALLEL = "dp"


class DistributedDataParallel:
    """A model trained by data-parallel ranks on batches of their own, with the names of veScale's and PyTorch's.

    The loop is forward, backward, `finish_grad_sync()`, and the optimizer's step. Creating one is collective: every
    rank gets rank 0's parameters and buffers, and names, shapes, dtypes and settings are compared. Other attributes
    are the model's: `parameters()`, `state_dict()`, `train()`. Backward may leave out parameters, others on each
    rank: they count as zero. Frozen parameters are left alone.

    Args:
        model: one of `clcomm.engine`, of PyTorch, of netcl or of NumPy arrays: see `clcomm.sync.adapters`.
        comm: the data-parallel ranks, such as `mesh["dp"]`; a Mesh: its axis "dp", or else its first.
        bucket_size, use_bucketing, settings: as the Synchronizer's; `settings` are its other arguments.
        overlap_grad_reduce: reduce buckets during backward; "auto": where that is faster. Of several backwards in a
            step all but the last then belong in `no_sync()`. Not used once a DistributedOptimizer reduces.
        zero: the stage of ZeRO, 1, 2 or 3, see docs/zero.md; 0: none, unless
            `use_distributed_optimizer` asks for stage 1.
        use_distributed_optimizer: `DistributedOptimizer(optimizer, ddp.synchronizer)` follows, which reduce-scatters
            the gradients in its step; until there is one, `finish_grad_sync()` all-reduces them.
        broadcast_buffers: give every rank rank 0's buffers before each forward of a training step; not under a policy,
            where `finish_step()` follows the optimizer's step (docs/policies.md). With `shards` it gives all shards
            those of shard 0 after each step.

    Attributes:
        synchronizer: averages the gradients.

    Raises:
        ArgumentError: an argument is invalid; on every rank.
        MismatchError: ranks differ in the model or in a setting; on every rank.
    """

    def __init__(
        self,
        model: Any,
        comm: Communicator | Mesh,
        *,
        bucket_size: int | str | None = None,
        use_bucketing: bool | None = None,
        overlap_grad_reduce: bool | str = False,
        use_distributed_optimizer: bool = False,
        zero: int = 0,
        broadcast_buffers: bool = True,
        **settings: Any,
    ):
        self.comm = comm = ranks_along(comm, DATA_PARALLEL, else_first=True)
        given = {"bucket_size": bucket_size, "use_bucketing": use_bucketing, **settings}
        own = {"use_distributed_optimizer": use_distributed_optimizer, "broadcast_buffers": broadcast_buffers}
        compared = {**given, **own, "zero": zero, "overlap": overlap_grad_reduce}
        lines = [f"{name} {value}" for name, value in compared.items()]
        require_agreement(comm, "DistributedDataParallel", lines, "give every rank the same settings")
        is_sharded = bool(use_distributed_optimizer or zero)
        self._overlap = False if is_sharded else overlap_grad_reduce
        self.module, self.synchronizer = model, Synchronizer(comm, overlap=self._overlap, zero=zero or 1, **given)
        self.synchronizer.broadcast_parameters(model)
        space = self.synchronizer.models.of(model).space
        if is_sharded and space.flat_space is None:
            name, off = ("zero", 0) if zero else ("use_distributed_optimizer", False)
            raise ArgumentError(
                f"{name}: expected {off} for other libraries' models, whose optimizers' state "
                f"cannot be divided between ranks, got {zero or True} for {type(model).__name__}"
            )
        sends = broadcast_buffers and self.synchronizer.models.settings.policy is None
        self._has_shards = self.synchronizer.shards is not None
        self._sends_buffers = sends and (comm.size > 1 or self._has_shards) and bool(space.adapter.buffers())
        self._is_paused = False
        self._joining: _Join | None = None
        self._has_open_step = False
        if self._has_shards:
            space.adapter.watch_gradients(self._require_block)

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet: a copy that is being made
            raise AttributeError(name)
        return getattr(self.module, name)

    def __reduce__(self) -> NoReturn:
        raise no_copy("DistributedDataParallel", "copy its module and make another")

    # --- a step ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, in training with rank 0's buffers."""
        if self._has_shards and getattr(self.module, "training", True):
            self._require_block("forward")
        sends = self._sends_buffers and not (self._is_paused or self._has_shards) and self._joining is None
        if sends and getattr(self.module, "training", True):
            self.synchronizer.broadcast_buffers(self.module)
        return self.module(*args, **kwargs)

    __call__ = forward

    @refused
    def shards(self, batch: Any) -> Iterator[Any]:
        """Yield each of this rank's logical shards of a batch in turn, then average the gradients; collective.

        `for x, y in ddp.shards(batch): loss_fn(ddp(x), y).backward()` has the same bits on any number of ranks. What
        the parameters had as gradients before the loop is added to the mean.

        Args:
            batch: tensors or arrays, alone or in tuples, lists and mappings: this rank's shards' samples, in order, of
                which each shard has as many. See `batches`.

        Raises ArgumentError, on every rank, without the setting `shards`, for samples that its shards do not divide,
        and after a loop that was left; MismatchError where ranks have other numbers of samples a shard.
        """
        self._steps_over_shards()
        own = self.synchronizer.shards.own  # type: ignore[union-attr]  # there are steps over them
        if self._has_open_step:
            raise ArgumentError("shards: expected each loop over them to run to its end, got one that was left before")
        lengths = sorted({each.shape[0] for each in _leaves(batch)})
        if len(lengths) != 1 or not lengths[0] or lengths[0] % len(own):
            raise ArgumentError(
                f"batch: expected samples for {len(own)} shards of {self.synchronizer.shards} on rank "
                f"{self.comm.rank}, as many for each, got {' and '.join(map(str, lengths)) or 'no tensor'}; take "
                "ddp.batches(samples, batch_size) as the loader's batch_sampler"
            )
        samples = lengths[0] // len(own)
        require_agreement(self.comm, "shards", [f"{samples} samples a shard"], "give each shard of all ranks as many")
        return self._step_over_shards(own, batch, samples)

    def batches(
        self, length: int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> ShardBatches:
        """Return the indices of this rank's part of each batch, for a PyTorch DataLoader's `batch_sampler`.

        Args:
            length: of the dataset.
            batch_size: samples of all ranks together, as many in each logical shard.
            shuffle, seed, drop_last: as DistributedSampler's, of as many ranks as there are shards.
        """
        self._steps_over_shards()
        return ShardBatches(self.synchronizer.shards, length, batch_size, shuffle, seed, drop_last)  # type: ignore[arg-type]

    def _steps_over_shards(self) -> ShardedSteps:
        return self.synchronizer.models.of(self.module).steps_of("shards")

    def _step_over_shards(self, own: range, batch: Any, samples: int) -> Iterator[Any]:
        self._has_open_step = True
        try:
            for number, shard in enumerate(own):
                with self.synchronizer.shard(self.module, shard):
                    yield _cut(batch, slice(number * samples, (number + 1) * samples))
        except BaseException:
            self.synchronizer.models.of(self.module).space.adapter.drop_gradients()  # of some of the shards alone
            raise
        self._has_open_step = False
        self.finish_grad_sync()
        if self._sends_buffers:
            self.synchronizer.broadcast_buffers(self.module)

    @refused
    def _require_block(self, what: str) -> None:
        """Raise ArgumentError, on every rank, for a forward or a parameter's backward that belongs to no shard."""
        ours = averaging_of(self.module)
        if ours is None or ours.sharded_steps is None or ours.sharded_steps.is_active:
            return
        raise ArgumentError(
            f"{what}: expected forward and backward within `for x, y in ddp.shards(batch): loss_fn(ddp(x), "
            "y).backward()`, as a loss over this rank's whole batch cannot be cut into shards exactly, got it outside; "
            "to evaluate, call eval()"
        )

    def finish_grad_sync(self, *, samples: float | None = None) -> None:
        """Replace each gradient by its mean over the ranks, after backward; collective. No-op within `no_sync()`.

        Args:
            samples: number of samples in this rank's mean gradient; None after `expect_samples`.
        """
        if self._joining is None:
            self.synchronizer.sync_gradients(self.module, samples=samples)
        elif not self._is_paused:
            self._joining.finish(samples)

    def finish_step(self) -> None:
        """Follow the optimizer's step under a policy: see `Synchronizer.finish_step`."""
        self.synchronizer.finish_step(self.module)

    def align_parameters(self) -> None:
        """Give all ranks the same parameters under a policy: see `Synchronizer.align_parameters`."""
        self.synchronizer.align_parameters(self.module)

    def expect_samples(self, samples: float) -> None:
        """Set the argument of `finish_grad_sync(samples=...)` before a step's first backward; collective.

        A SyncBatchNorm needs it there: see `Synchronizer.expect_samples`.
        """
        self.synchronizer.expect_samples(self.module, samples)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the averaged gradients so that their norm is at most `max_norm`; return the norm before."""
        return clip_grad_norm(self.synchronizer, self.module, max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate: within this block `finish_grad_sync()` does nothing."""
        before, self._is_paused = self._is_paused, True
        try:
            with self.synchronizer.no_sync():
                yield
        finally:
            self._is_paused = before

    def register_comm_hook(self, hook: CommHook | None) -> None:
        """Let `hook(gradient, comm, out, bucket)` reduce each bucket: see `Synchronizer.register_comm_hook`."""
        self.synchronizer.register_comm_hook(hook)

    @contextmanager
    def join(
        self, *, divide_by_initial_world_size: bool = True, step: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Let ranks run out of batches at different steps, within this block; as PyTorch's `join`.

        A rank that leaves the block takes part in the others' `finish_grad_sync()` with gradients of zero, until all
        have left.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; False: of those that
                still have batches. Where ranks pass `samples` to `finish_grad_sync()`, by the number of samples.
            step: the loop's calls after `finish_grad_sync()`; ranks without batches then do the same, so that their
                optimizers' state stays alike too. None: they get the parameters of a rank with the most steps at
                the end.
        """
        if self._joining is not None:
            raise ArgumentError("join: expected to be entered once, got a join() within another")
        if self._overlap is True:
            raise ArgumentError(
                "join: expected overlap_grad_reduce=False, as ranks without batches run no backward, got True"
            )
        joining = self._joining = _Join(self, divide_by_initial_world_size, step)
        try:
            with self.synchronizer.join(self.module, joining.shadow):
                yield
            joining.end()
        finally:
            self._joining = None


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch; ArgumentError for anything else."""
    if isinstance(batch, (tuple, list, Mapping)):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(each)
    elif not getattr(batch, "shape", ()):
        raise ArgumentError(f"batch: expected tensors of samples in tuples, lists and mappings, got {batch!r:.50}")
    else:
        yield batch


def _cut(batch: Any, part: slice) -> Any:
    """Return a part of each tensor, a copy: kernels may add up in an order that depends on the address."""
    if isinstance(batch, Mapping):
        return {name: _cut(each, part) for name, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_cut(each, part) for each in batch]
    cut = batch[part]
    return (cut.clone if hasattr(cut, "clone") else cut.copy)()


class _Join:
    """The block of `join`, in which ranks run out of batches at different steps.

    Args:
        divides_by_all: whether sums of gradients are divided by the number of all ranks.
        step: the call of a rank without batches after each synchronisation; None: nothing.
    """

    def __init__(self, ddp: DistributedDataParallel, divides_by_all: bool, step: Callable[[], object] | None):
        self._ddp, self._sync, self._step = ddp, ddp.synchronizer, step
        self._of = float(ddp.comm.size) if divides_by_all else None
        self._steps = 0

    def finish(self, samples: float | None) -> None:
        """Average the gradients of a rank that has a batch; collective."""
        if samples is None:
            self._sync.sync_gradients(self._ddp.module, samples=1, of=self._of)
        else:
            self._sync.sync_gradients(self._ddp.module, samples=samples)
        self._steps += 1
        self._send_buffers(has_batch=True)

    def shadow(self) -> None:
        """Run a synchronisation's calls on a rank without a batch; collective."""
        self._send_buffers(has_batch=False)
        if self._step is not None:
            self._step()

    def end(self) -> None:
        """Give every rank the parameters of a rank with the most steps, unless all have stepped alike; collective."""
        if self._step is None:
            steps = self._ddp.comm.all_gather(np.array([self._steps]), label=CHECKS)
            self._sync.broadcast_parameters(self._ddp.module, int(steps.argmax()))

    def _send_buffers(self, *, has_batch: bool) -> None:
        """Give every rank the buffers of the lowest rank that has a batch; collective."""
        if self._ddp._sends_buffers:
            flags = self._ddp.comm.all_gather(np.array([has_batch]), label=CHECKS)
            self._sync.broadcast_buffers(self._ddp.module, int(flags.argmax()))
