"""DistributedDataParallel: data-parallel replicas of a model, over the Synchronizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import ArgumentError, no_copy
from clcomm.comm.communicator import Communicator
from clcomm.parallel.mesh import Mesh, ranks_along
from clcomm.sync.agreement import CHECKS, require_agreement
from clcomm.sync.clipping import clip_grad_norm
from clcomm.sync.compression import CommHook
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
            where `finish_step()` follows the optimizer's step (docs/policies.md).

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
        self._sends_buffers = sends and comm.size > 1 and bool(space.adapter.buffers())
        self._is_paused = False
        self._joining: _Join | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # not there yet: a copy that is being made
            raise AttributeError(name)
        return getattr(self.module, name)

    def __reduce__(self) -> NoReturn:
        raise no_copy("DistributedDataParallel", "copy its module and make another")

    # --- a step ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result, in training with rank 0's buffers."""
        sends = self._sends_buffers and not self._is_paused and self._joining is None
        if sends and getattr(self.module, "training", True):
            self.synchronizer.broadcast_buffers(self.module)
        return self.module(*args, **kwargs)

    __call__ = forward

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
