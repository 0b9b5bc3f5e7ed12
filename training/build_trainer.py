"""From a run's options to its Trainer: the engine's model, this rank's loader, kernels, Synchronizer and optimizer."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.host import require_memory
from clcomm.base.units import format_size
from clcomm.comm.communicator import Communicator
from clcomm.engine import RandomStream
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.sync.balance import MOST_TIMES, Balancer
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.sampler import BalancedSampler, ContiguousSampler, DistributedSampler, Sampler
from clcomm.sync.synchronizer import Synchronizer
from training.data.augment import ShiftAndMirror
from training.data.datasets import ArrayDataset
from training.data.loader import Loader, default_prefetch
from training.data.shard_sampler import ShardSampler
from training.engines.build_together import build_together
from training.engines.parts import Parts, Placement, build_parts
from training.evaluate import EVALUATION_BATCH
from training.options import TrainingOptions
from training.schedules import parse_schedule
from training.trainer import Trainer
from training.waiting import prepare

#: The Synchronizer's names for the choices of --overlap.
_OVERLAP: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}


def build_model(options: TrainingOptions, comm: Communicator, train: ArrayDataset) -> Parts:
    """Return the engine's parts for images of the training set, on this rank's device."""
    parts = build_parts(
        options.engine, options.model, train.image_shape, train.classes, options.seed,
        device=Placement(options.device, comm.local_rank, comm.local_size, comm.cores),
    )  # fmt: skip
    train.prepare_gather = parts.prepare_gather
    if parts.opencl is not None:
        RandomStream.of(parts.opencl).seed(options.seed, comm.rank)
    return parts


def make_loader(options: TrainingOptions, comm: Communicator, train: ArrayDataset) -> Loader:
    """Return this rank's loader, without an epoch's last batch where that does not have a run's equal parts.

    Raises ArgumentError, before memory is allocated, for a batch larger than the rank's shard or than memory.
    """
    sampler = _sampler(options, comm, len(train))
    prefetch = default_prefetch(comm.cores)
    augment = ShiftAndMirror(options.seed, len(train), train.black) if options.augment else None
    held = min(options.grad_accumulation, -(-sampler.longest_shard // options.batch_size))
    most = options.batch_size * (MOST_TIMES if options.balance == "auto" else 1)
    if options.logical_shards:
        held *= len(LogicalShards.of(comm, options.logical_shards).own)
    rest = sampler.longest_shard % options.batch_size
    drop_last = rest % options.batch_parts > 0
    image_bytes = np.dtype(np.float32).itemsize * math.prod(train.image_shape)
    try:
        loader = Loader(
            train, sampler, options.batch_size, prefetch=prefetch, drop_last=drop_last, held=held, augment=augment
        )
    except ArgumentError as error:
        size = format_size(options.batch_size * image_bytes)
        raise ArgumentError(f"{error}; its images alone would take {size} a rank") from None
    needed_bytes = min(most, sampler.longest_shard) * image_bytes * (held + 1 + prefetch)
    require_memory("batch_size", options.batch_size, needed_bytes, comm.local_size)
    return loader


def _sampler(options: TrainingOptions, comm: Communicator, length: int) -> Sampler:
    if options.balance == "auto" and not options.logical_shards:
        return BalancedSampler(length, comm.rank, comm.size, (options.batch_size,) * comm.size, seed=options.seed)
    if options.logical_shards:
        if options.logical_shards > length:
            raise ArgumentError(
                f"logical_shards: expected at most {length}, the training samples, got {options.logical_shards}"
            )
        shards = LogicalShards.of(comm, options.logical_shards)
        return ShardSampler(
            [DistributedSampler(length, shard, shards.count, seed=options.seed) for shard in shards.own]
        )
    sampler_class = ContiguousSampler if options.sharding == "contiguous" else DistributedSampler
    return sampler_class(length, comm.rank, comm.size, seed=options.seed, pad=options.uneven_inputs == "pad")


def build_kernels(
    options: TrainingOptions, comm: Communicator, train: ArrayDataset, parts: Parts, loader: Loader,
    evaluation_batch: int = EVALUATION_BATCH,
) -> None:  # fmt: skip
    """Build the run's kernels once for all ranks of a host, where the engine has kernels to build; collective."""
    if parts.opencl is None or parts.rehearse is None:
        prepare(None)
        return
    batch_size = min(options.batch_size, loader.sampler.longest_shard)
    rehearse, run = parts.rehearse, ((batch_size, evaluation_batch), options.optimizer, options.learning_rate)
    rows = comm.local_size
    # On several hosts a host's ranks make a sum, and the mean is computed from the hosts' sums.
    sums = rows, rows if rows == comm.size else 1
    settings, ways = _optimizer_settings(options), (options.compression, options.precision)
    model = (options.model, *(getattr(options, name) for name in options.ALSO_SHARED))
    identity = repr((model, train.image_shape, train.classes, run, settings, sums, ways))
    kernels = partial(rehearse, *run, settings, *sums, *ways)
    build_together(comm, parts.opencl, kernels, identity)
    prepare(kernels)


def make_trainer(options: TrainingOptions, comm: Communicator, parts: Parts, loader: Loader, epochs: int) -> Trainer:
    """Return a Trainer with the parts' model and a new optimizer; collective."""
    sync = Synchronizer(
        comm,
        use_bucketing=not options.no_bucketing,
        first_bucket_size=options.first_bucket_size,
        split_tensors=options.split_tensors,
        overlap=_OVERLAP[options.overlap] if options.policy == "none" else False,
        check_replicas_every=options.check_replicas,
        on_divergence=options.on_divergence,
        check_finite=options.check_finite,
        compression=options.compression,
        zero=options.zero_stage or 1,
        precision=options.precision,
        shards=options.logical_shards,
        policy=options.policy,
    )
    optimizer = parts.make_optimizer(options.optimizer, options.learning_rate, **_optimizer_settings(options))
    if options.zero_stage:
        optimizer = DistributedOptimizer(optimizer, sync)
    trainer = Trainer(
        comm, sync, parts, optimizer, loader, accumulation=options.grad_accumulation, clip_norm=options.clip_norm,
        balancer=Balancer(comm, options.batch_size, shards=sync.shards) if options.balance == "auto" else None,
        scaler=GradScaler(sync, enabled=options.scales_losses), audit_every=options.audit_every,
    )  # fmt: skip
    trainer.schedule = parse_schedule(options.schedule, trainer.total_steps(epochs))
    return trainer


def _optimizer_settings(options: TrainingOptions) -> dict[str, object]:
    return {
        "momentum": options.momentum, "nesterov": options.nesterov, "weight_decay": options.weight_decay,
    }  # fmt: skip
