"""Gradient compression: each scheme is a communication hook of the Synchronizer.

A hook is called as `hook(gradient, comm, out, bucket)` for each bucket, in the same order on every rank.

- gradient: this rank's, one-dimensional, read-only.
- out: of the same shape and dtype, for the mean over the ranks, with the same bits on every rank; this rank's memory.
- bucket: the Bucket of the model's FlatLayout; its `ranges` are the places of its parameters.

Its traffic goes through `comm` and is counted as one all-reduce; the Synchronizer waits for what it starts in the
background. It returns None, `out` or a handle; anything else is an ArgumentError.

A hook that keeps state between steps is a `StatefulHook`, so that checkpoints can hold it. Attributes of a hook:

- elementwise: it gives the same result for any buckets; `bucket_size="auto"` tries sizes only with such hooks.
- between_hosts: it needs no more of a Communicator than `clcomm.sync.compression.ranks.Ranks`, and accepts the same
  memory as gradient and out. Where hosts reduce in shared memory, it runs on each host's first rank only, on the host's
  sum.

- refuses_parts: why it does not reduce a model that tensor-parallel ranks divide, in words; without it, it does.

A hook that can prepare its calls for fixed memory is a `clcomm.sync.compression.ranks.PreparedHook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.comm.communicator import Communicator


class CommHook(Protocol):
    """Reduces a bucket's gradient in place of an all-reduce."""

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None: ...


@runtime_checkable
class StatefulHook(CommHook, Protocol):
    """A hook with state; flat: the model's flat gradients, of which its buckets' gradients are parts.

    It may also have `check_state(layout, state)`, which raises ArgumentError, changing nothing, for a state
    that `state_of` cannot return for a model of this FlatLayout.
    """

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's state for the model, by the same names on every rank."""

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore a `state_of`."""


def parse_compression(text: str) -> CommHook | None:
    """Return the hook for "fp16", "bf16", "int8", "topk:SHARE", "powersgd:RANK" or "demo:COUNT"; None for "none"."""
    if text == "none":
        return None
    from clcomm.sync.compression.decoupled import DeMo  # here, as most programs compress nothing
    from clcomm.sync.compression.powersgd import PowerSGD
    from clcomm.sync.compression.quantized import BFloat16, Float16, Int8, TopK

    name, _, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
    plain: dict[str, Callable[[], CommHook]] = {"fp16": Float16, "bf16": BFloat16, "int8": Int8}
    try:
        if name in plain and text == name:
            return plain[name]()
        if name == "topk" and 0 < float(argument) <= 1:
            return TopK(float(argument))
        if name == "powersgd" and int(argument) >= 1:
            return PowerSGD(int(argument))
        if name == "demo" and 1 <= int(argument) <= 4096:
            return DeMo(int(argument))
    except ValueError:
        pass
    raise ArgumentError(
        f"compression: expected none, fp16, bf16, int8, topk:SHARE with a share such as 0.01, powersgd:RANK with a "
        f"rank such as 4, or demo:COUNT with a count such as 32, got {text!r}"
    )
