"""Which options of a training job exclude each other, with the one line that says so."""

from __future__ import annotations

from typing import Any, TypeAlias

from clcomm.base.errors import ArgumentError
from clcomm.sync.compression import StatefulHook, parse_compression
from clcomm.sync.policies import parse_policy

#: A `training.options.JobOptions` or `TrainingOptions`, which import this file.
JobOptions: TypeAlias = Any
TrainingOptions: TypeAlias = Any


def refuse_conflicts(options: JobOptions) -> None:
    """Raise ArgumentError for the first options of any job that exclude each other."""
    compresses, joins = options.compression != "none", options.uneven_inputs == "join"
    parse_compression(options.compression)
    if parse_policy(options.policy) is not None:
        _refuse("--policy", _works_on_gradients(options))
    if options.averages_signs and options.clip_norm is not None:
        raise ArgumentError("--clip-norm: expected none with --compression demo, which leaves signs alone of gradients")
    if options.split_tensors and compresses:
        raise ArgumentError("--split-tensors: expected no --compression with it, which needs whole tensors")
    if options.zero_stage:
        _refuse(options.sharded_by, _needs_buckets(options))
    _refuse_precision(options)
    if joins and options.overlap == "on":
        raise ArgumentError("--uneven-inputs join: expected no --overlap on with it; use one of the two")
    if options.balance == "auto":
        _refuse("--balance auto", _needs_equal_samples(options))


def refuse_other_sums(options: TrainingOptions) -> None:
    """Raise ArgumentError for options whose gradients logical shards, or audits, cannot compute elsewhere."""
    sums = {
        f"--engine {options.engine}": options.engine != "native",
        "--uneven-inputs join": options.uneven_inputs != "pad",
        "--compression": options.compression != "none",
        "--policy": options.policy != "none",
    }
    if options.logical_shards:
        places = {"--sharding contiguous": options.sharding != "interleaved"}
        _refuse("--logical-shards", sums | places | {f"--zero {options.zero}": options.zero > 1})
    if options.audit_every:
        more = {"--balance auto": options.balance == "auto", "--zero": bool(options.zero_stage)}
        _refuse("--audit-every", sums | more)


def _needs_buckets(options: JobOptions) -> dict[str, bool]:
    """Return which options are given that a sharded update does not have."""
    return {
        "--overlap on": options.overlap == "on",
        "--compression": options.compression != "none",
        "--no-bucketing": options.no_bucketing and options.zero_stage == 1,
        "--first-bucket-size": options.first_bucket_size is not None and options.zero_stage == 1,
        "--split-tensors": options.split_tensors,
        "--uneven-inputs join": options.uneven_inputs == "join" and options.zero_stage > 1,
    }


def _needs_equal_samples(options: JobOptions) -> dict[str, bool]:
    return {
        "--overlap on": options.overlap == "on",
        "--sharding contiguous": options.sharding == "contiguous",
        options.sharded_by: options.zero_stage > 1,
    }


def _works_on_gradients(options: JobOptions) -> dict[str, bool]:
    """Return which options are given that work on the gradients of all ranks, which a policy does not average."""
    return {
        "--compression": options.compression != "none",
        "--overlap on": options.overlap == "on",
        options.sharded_by: bool(options.zero_stage),
        "--balance auto": options.balance == "auto",
        "--uneven-inputs join": options.uneven_inputs == "join",
        "--check-finite": options.check_finite,
        "--check-replicas": bool(options.check_replicas),
        f"--precision {options.precision}": options.precision != "float32",
        "--loss-scaling": options.loss_scaling,
        f"--clip-norm with --engine {options.engine}": options.clip_norm is not None and options.engine != "native",
    }


def _refuse(option: str, given: dict[str, bool]) -> None:
    for name in (name for name, is_given in given.items() if is_given):
        raise ArgumentError(f"{option}: expected no {name} with it; use one of the two")


def _refuse_precision(options: JobOptions) -> None:
    """Raise ArgumentError if an option is given that stored precisions or loss scaling do not have."""
    scales = "--loss-scaling" if options.loss_scaling else f"--precision {options.precision}"
    if options.engine != "native" and (options.precision != "float32" or options.scales_losses):
        raise ArgumentError(f"{scales}: needs --engine native, got {options.engine}")
    if options.scales_losses and options.check_finite:
        raise ArgumentError(f"{scales}: expected no --check-finite with it, as steps with NaN or Inf are skipped")
    if options.scales_losses and isinstance(parse_compression(options.compression), StatefulHook):
        raise ArgumentError(
            f"{scales}: expected --compression none, fp16 or bf16 with it, as residuals are at the scale of their "
            f"step, got {options.compression}"
        )
