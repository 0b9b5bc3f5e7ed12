"""The Synchronizer: every rank starts from root's parameters and steps with the mean of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import no_copy
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.units import parse_size
from clcomm.sync import compression_state, replicas, sample_weights
from clcomm.sync.bucket_plan import GRADIENTS, hook_name
from clcomm.sync.compression import CommHook
from clcomm.sync.decision import Decision
from clcomm.sync.hooks import refuse_hook
from clcomm.sync.known_models import KnownModels
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.model_sync import ModelSync
from clcomm.sync.replicas import PARAMETERS
from clcomm.sync.settings import SyncSettings, takes

__all__ = ["GRADIENTS", "PARAMETERS", "Synchronizer"]


class Synchronizer:
    """Keeps the replicas of models alike, on the ranks of a Communicator.

    Models are those of this package's engine, of PyTorch, tinygrad, JAX, netcl or NumPy arrays.
    Its parameters' names, shapes and dtypes, and the bucket plan, are compared over the ranks before the first
    traffic, and so are the settings; MismatchError with the same text is raised on every rank where they differ.

    Args:
        comm: the ranks.
        use_bucketing, bucket_size: as the Communicator's, unless given here. bucket_size "auto" tries a few sizes
            during the first steps, which changes no result, and keeps the fastest; see `decisions()`.
        first_bucket_size: that of the first bucket, which can be smaller so that communication begins early.
        split_tensors: cut tensors larger than `bucket_size` into several buckets; otherwise each has its own.
        overlap: begin a bucket as soon as backward has completed it; the results are the same. "auto": only if that
            is faster in the first steps; see `decisions()`. Between a backward and its `sync_gradients` nothing may
            change the gradients then, all but the last micro-batch of a step belong in `no_sync()`, and every rank
            runs the same collectives.
        check_replicas_every: compare the replicas' hashes after so many synchronisations; 0: after broadcasts, and
            before the first one, only. Ranks of several libraries or kinds of device compare them after the first
            step and every 100th then, and go on with those of most ranks.
        check_start: compare them before a model's first synchronisation, where a forgotten `broadcast_parameters`
            shows; False: the ranks' parameters are to differ.
        on_divergence: where they differ, "raise" DivergenceError on every rank, or "rebroadcast" the parameters that
            most ranks have (of equally many the lowest rank's), and the state of the optimizer that
            `attach_optimizer` named.
        check_finite: raise NonFiniteError on every rank when a mean gradient holds NaN or Inf.
        compression: the form in which gradients travel. "none" leaves them as they are; "fp16" and "bf16" round them;
            "int8", "topk:SHARE" and "powersgd:RANK" send less and add in the next step what they left out (error
            feedback); "demo:COUNT" replaces the optimizer's momentum too (docs/policies.md). `register_comm_hook`
            takes others.
        algorithm: "ring", "halving", "tree" or "direct": reduce buckets with messages from rank to rank, to study them
            (docs/algorithms.md); instead of compression. None: the Communicator's own all-reduce, which is faster.
        combination: what the ranks' gradients become: their "mean", or "adasum": tensor by tensor an adaptive sum,
            which is the sum of orthogonal gradients and the mean of parallel ones (Maleki et al., MLSys 2021), so that
            the learning rate of one rank holds for many; without compression, algorithm and samples.
        zero: what a DistributedOptimizer of a model divides between the ranks, as the stages of ZeRO number it: 1: the
            optimizer's state; 2: gradients too, in units of up to `bucket_size`; 3: parameters too (docs/zero.md).
        precision: "float32", "bf16" or "fp16": what the engine's models store and send parameters in. The optimizer
            then has float32 masters; gradients are float32 in any case (docs/precision.md).
        shards: the logical shards of a step, at least one for each rank: with the same number, runs on any number of
            ranks have the same bits. Backward then runs in `shard()`; without compression, algorithm, samples and
            sharded updates (docs/summation-order.md). None: each rank's batch is its own.
        policy: "none", or how ranks train that exchange parameters every `h` steps in place of each step's gradients:
            "local:h=8", "diloco:h=50", "streaming:h=50", "sparseloco:h=50" or "noloco:h=50" (docs/policies.md).
            `finish_step(model)` then follows the optimizer's step.
    """

    @takes(SyncSettings)
    def __init__(self, settings: SyncSettings):
        self.comm = settings.comm
        #: The models that it has seen, for what works on them beside it, such as a DistributedOptimizer.
        self.models = KnownModels(settings)
        self.guard = self.models.guard
        self._has_policy = settings.policy is not None

    def __reduce__(self) -> NoReturn:
        raise no_copy("Synchronizer", "make one for each model")

    @property
    def use_bucketing(self) -> bool:
        """Whether gradients are reduced in buckets unless a call sets it; settable between steps, on all ranks."""
        return self.models.settings.use_bucketing

    @use_bucketing.setter
    def use_bucketing(self, use_bucketing: bool) -> None:
        self.models.use(self.models.settings.changed(use_bucketing=bool(use_bucketing)))

    @property
    def bucket_size(self) -> int:
        """The largest size of a bucket in bytes, as given or, with "auto", as chosen; settable between steps."""
        return self.models.bucket_size

    @bucket_size.setter
    def bucket_size(self, nbytes: int | str) -> None:
        self.models.use_bucket_size(parse_size(nbytes))

    # --- a step ---

    def broadcast_parameters(self, model: object, root: int = 0) -> None:
        """Give every rank root's parameters, in one broadcast, and its buffers; check that the replicas are alike."""
        replicas.broadcast(self.models.of(model), root)

    def broadcast_buffers(self, model: object, root: int = 0) -> None:
        """Give every rank root's buffers, such as the running statistics of batch norm, in one broadcast.

        Training leaves each rank with those of its own batches: call it before an evaluation, so that all ranks
        evaluate one model. Collective, if the model has any.
        """
        replicas.broadcast_buffers(self.models.of(model), root)

    def average_parameters(self, model: object) -> None:
        """Replace each rank's parameters by the mean of all ranks'; the same bits everywhere. Collective.

        For local SGD of a loop's own: ranks take steps of their own, without `sync_gradients`, and call it after every
        K-th; policy="local:h=K" does the same. Optimizers' state and buffers stay each rank's own.
        Raises ArgumentError where a DistributedOptimizer divides the parameters' update, within `join()`, after
        `expect_samples`, as all ranks' parameters count alike, and for a model with a SyncBatchNorm.
        """
        replicas.average(self.models.of(model))

    def full_parameters(self, model: object) -> AbstractContextManager[None]:
        """Return a block within which every rank has all parameters, to evaluate or to save; entering it is collective.

        Without it reading a parameter is collective with zero=3, where ranks have no memory in common. They must not
        change within it.
        """
        flat = self.models.of(model).space.flat_space
        return nullcontext() if flat is None or flat.gathered is None else flat.gathered.all_gathered()

    def attach_optimizer(self, model: object, optimizer: object) -> None:
        """Name the optimizer whose `state_dict` is sent along where a differing replica gets another's parameters."""
        self.guard.attach(model, optimizer)

    def sync_gradients(
        self,
        model: object,
        use_bucketing: bool | None = None,
        *,
        samples: float | None = None,
        of: float | None = None,
    ) -> None:
        """Replace each gradient by its mean over the ranks; a rank without one counts as zero where another has one.

        Within `no_sync()` nothing happens, nor where a DistributedOptimizer reduces the model's gradients in its step.
        With a policy gradients stay this rank's own.

        Args:
            model: whose gradients are averaged.
            use_bucketing: True: in buckets of up to `bucket_size` bytes; False: single tensors; the bits are the same.
            samples: how many samples this rank's gradient is the mean of; the result is then the mean over all ranks'
                samples. Every rank gives its number, or none does; None after `expect_samples`.
            of: the number of samples to divide by instead of all ranks' together; the same on every rank. Where they
                know that of all ranks, it saves the small all-reduce that adds them up.

        Raises:
            MismatchError: on every rank, in a model's first call where the replicas differ.
            ArgumentError: on every rank, where `samples` differ and a SyncBatchNorm has added up the ranks' gradients.
            NonFiniteError: on every rank, if `check_finite` is set and a mean holds NaN or Inf.
        """
        if self.models.is_paused:
            return
        ours = self.models.of(model)
        if self._has_policy:
            replicas.gradients_ready(ours, samples is not None or of is not None)
            return
        synchronise = partial(self._synchronise_weighted, ours, use_bucketing, samples, of)
        if not ours.space.adapter.record(synchronise):
            synchronise()

    def finish_step(self, model: object) -> None:
        """Follow an optimizer's step: with a policy it counts it, and every `h`-th makes the parameters alike.

        Collective in those steps; without a policy nothing happens. Raises ArgumentError before any `sync_gradients`.
        """
        if self._has_policy:
            replicas.finish_step(self.models.of(model))

    def align_parameters(self, model: object) -> None:
        """Give all ranks the same parameters between a policy's outer steps, to evaluate or to save; collective.

        An outer step is brought forward for it. Without a policy nothing happens.
        """
        if self._has_policy:
            replicas.align(self.models.of(model))

    def _synchronise_weighted(
        self, ours: ModelSync, use_bucketing: bool | None, samples: float | None, of: float | None
    ) -> None:
        # In the usual step all ranks' gradients count alike.
        is_weighted = samples is not None or self.models.in_join or ours.expected_weight is not None
        self._synchronise(ours, use_bucketing, sample_weights.take(ours, samples, of) if is_weighted else 1.0)

    def expect_samples(self, model: object, samples: float, *, of: float | None = None) -> None:
        """Set, before a step's first backward, of how many samples this rank's gradient will be the mean.

        `sync_gradients(model)` then averages over all ranks' samples. Where numbers differ and the model has a
        SyncBatchNorm it has to be known before backward, which adds up the ranks' gradients there. Every rank calls it.

        Args:
            model: whose gradients are averaged.
            samples, of: as for `sync_gradients`.

        Raises ArgumentError, on every rank, for a rank without samples where the model has a SyncBatchNorm.
        """
        sample_weights.expect(self.models.of(model), samples, of)

    def _synchronise(self, ours: ModelSync, use_bucketing: bool | None, weight: float) -> None:
        ours.require_unchanged()
        if self.models.hook is not None:
            refuse_hook(self.models.hook, ours.space)
        if not ours.has_started:
            replicas.check_start(ours)
        if ours.sharded_steps is not None:
            ours.sharded_steps.require_complete()
        if ours.sharded_update is not None:
            ours.sharded_update.expect_step(weight)
            return
        replicas.compare_settings(ours)
        ours.average(use_bucketing, weight)
        if ours.sharded_steps is not None:
            ours.sharded_steps.add_earlier()
        replicas.count_synchronisation(ours)

    def join(self, model: object, step: Callable[[], object]) -> AbstractContextManager[None]:
        """Let ranks run out of batches at different steps: `sync_gradients(model, samples=...)` within this block.

        A rank that leaves the block takes part in the others' synchronisations without samples of its own, each
        followed by `step()`, until all ranks have left. After an exception it waits for no rank. The idea is that of
        PyTorch's Join context manager.

        Args:
            model: the model that the loop trains.
            step: what the loop does after `sync_gradients`, such as clipping, the optimizer's step and `zero_grad`, so
                that the replicas stay alike.
        """

        def take_part() -> None:
            self._synchronise(self.models.of(model), None, 0.0)
            step()

        return sample_weights.join(self.models.of(model), take_part)

    def shard(self, model: object, shard: int) -> AbstractContextManager[None]:
        """Return a block in which the model computes one logical shard of the step; collective the first time.

        `for shard in sync.shards.own:` are this rank's; after the last of them comes `sync_gradients(model)`. In a
        block, all micro-batches of the shard run forward and backward, each weighed by its share of the shard's
        samples, of which all shards have equally many. Dropout draws the shard's own numbers, on every rank that
        computes it, and batch norm has the shard's own running statistics.

        Raises ArgumentError for a Synchronizer without `shards`, and for a shard that is not this rank's next.
        """
        return self.models.of(model).steps_of("shard").active(shard)

    def run_shards(self, model: object, compute: Callable[[int], object]) -> None:
        """Call `compute(shard)`, which runs forward and backward, for each of this rank's logical shards, in order.

        That is `with sync.shard(model, shard): compute(shard)`, for a model with a SyncBatchNorm too: its statistics
        are of all shards, so a rank's take turns there, each in a thread, one at a time. Raises ArgumentError as
        `shard`, and on every rank where one of its shards has other layers.
        """
        self.models.of(model).steps_of("run_shards").run(compute)

    @property
    def shards(self) -> LogicalShards | None:
        """How the ranks share out a step's logical shards; None: there are none."""
        return self.models.settings.shards

    def deal_shards(self, counts: Sequence[int]) -> LogicalShards:
        """Deal each rank so many of the logical shards from the next step on, in order; collective, between steps.

        The bits stay those of any other deal: what a shard has from step to step, its random numbers and buffers,
        goes with it. Raises ArgumentError, on every rank, for counts below 1 or of another sum than there are shards,
        within a step, and without `shards`; MismatchError where the ranks' counts differ.
        """
        return self.models.deal(counts)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients accumulate: within this block `sync_gradients` does nothing, also after an exception."""
        return self.models.paused()

    # --- settings of all models ---

    def register_comm_hook(self, hook: CommHook | None) -> None:
        """Let `hook(gradient, comm, out, bucket)` reduce each floating bucket from now on; None: a plain all-reduce.

        `clcomm.sync.compression` describes what a hook is given and has to do. Every rank registers the same one.
        Raises ArgumentError for one that cannot be called, and where a DistributedOptimizer reduces gradients, as it
        has no buckets to give a hook.
        """
        self.models.use_hook(hook)

    @property
    def compression(self) -> str:
        """What reduces the gradients, in words; "none" is a plain all-reduce."""
        return hook_name(self.models.hook)

    def decisions(self) -> tuple[Decision, ...]:
        """Return what was chosen by measuring, with the evidence."""
        return tuple(self.models.decisions)

    # --- what a model's synchronisation consists of ---

    def bucket_plan(self, model: object, use_bucketing: bool | None = None) -> tuple[Bucket, ...]:
        """Return the buckets that `sync_gradients` reduces, in order; collective the first time.

        A DistributedOptimizer reduces all gradients at once: one bucket, whatever the settings; with `zero` above 1 it
        reduces units of the settings' sizes.
        """
        return self.models.of(model).buckets(use_bucketing)

    def check_replicas(self, model: object) -> None:
        """Compare the parameters' bits over the ranks; where they differ, act by `on_divergence`. Collective.

        Under a policy, whose ranks are to differ, before the first step alone. With a DistributedOptimizer its settings
        too: MismatchError on every rank where they differ.
        """
        replicas.check(self.models.of(model))

    def get_communication_stats(self) -> dict[str, float]:
        """Return this rank's gradient traffic: all-reduce calls, their bytes, and the mean of these."""
        return self.comm.stats.all_reduces(GRADIENTS)

    # --- checkpoints of a compression's state ---

    def state_dict(self, model: Any) -> dict[str, np.ndarray]:
        """Return what compression or a policy keeps on this rank from step to step, by name; empty for nothing.

        With `shards` it is the number of steps, from which PyTorch's random numbers follow: the same on all ranks.

        Compression between hosts keeps it on the first rank of each. With a policy it is the rank's own parameters and
        what the policy keeps beside them.
        """
        if self._has_policy:
            steps = self.models.of(model).local_steps
            return {} if steps is None else steps.saved_state()
        if self.shards is not None:
            done = self.models.of(model).steps_of("state_dict").steps
            return {"steps": np.array(done)} if done else {}
        return compression_state.state_of(self.models, model)

    def load_state_dict(self, model: Any, state: Mapping[str, np.ndarray]) -> None:
        """Continue from this rank's `state_dict`; empty: from the start. Collective for a model not seen yet.

        Raises ArgumentError, changing nothing, for another model's.
        """
        if self.shards is not None:
            self.models.of(model).steps_of("load_state_dict").steps = int(state.get("steps", 0))
        elif not self._has_policy:
            compression_state.load_state(self.models, model, state)
        else:
            replicas.load_local_steps(self.models.of(model), state)
