"""What reduces the buckets, by the names that a Synchronizer's arguments give."""

from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.sync.adasum import AdasumHook
from clcomm.sync.algorithm_hook import AlgorithmHook
from clcomm.sync.bucket_plan import hook_name
from clcomm.sync.compression import CommHook, parse_compression
from clcomm.sync.model_ranks import is_divided, refuse_mixing
from clcomm.sync.shared_space import SharedSpace

#: What the ranks' gradients can become.
COMBINATIONS = MEAN, ADASUM = ("mean", "adasum")


def hook_of(compression: str, algorithm: str | None, combination: str) -> CommHook | None:
    """Return what reduces each bucket, None for a plain all-reduce.

    Raises ArgumentError for an unknown name, and where more than one of the three asks for another than that.
    """
    hook = parse_compression(compression)
    if algorithm is not None:
        if hook is not None:
            raise ArgumentError(f"algorithm: expected None with compression {compression}, got {algorithm!r}")
        hook = AlgorithmHook(algorithm)
    if combination not in COMBINATIONS:
        raise ArgumentError(f"combination: expected one of {', '.join(COMBINATIONS)}, got {combination!r}")
    if combination == ADASUM:
        if hook is not None:
            raise ArgumentError(f"combination: expected 'mean' with compression {hook_name(hook)}, got 'adasum'")
        hook = AdasumHook()
    return hook


def refuse_hook(hook: CommHook, space: SharedSpace) -> None:
    """Raise ArgumentError, in all stages, where what reduces the buckets does not go with the model."""
    if isinstance(hook, AdasumHook):
        refuse_mixing(space, "combination='adasum'", "whose backward adds up gradients of several ranks")
    reason = getattr(hook, "refuses_parts", "")
    if reason and is_divided(space):
        raise ArgumentError(
            f"model: expected one that tensor-parallel ranks do not divide with {hook_name(hook)}, as {reason}, "
            "got one that they do"
        )
