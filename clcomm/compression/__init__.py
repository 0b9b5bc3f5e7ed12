"""Gradients that travel in fewer bytes: each scheme is a communication hook of the Synchronizer.

A hook is called as `hook(gradient, comm, out, bucket)` for each bucket, in the same order on every rank. gradient: this
rank's, one dimension, not to be written. out: of the same shape and dtype, where the mean over the ranks is to appear,
with the same bits on every rank; memory of this rank alone. bucket: the layout's,
whose slots tell which parameter lies where. Its traffic goes through `comm` and is counted as one all-reduce; what it
began in the background is waited for. It returns None, `out` or a handle; anything else is an ArgumentError.

A hook that keeps something from step to step is a `StatefulHook`, so that checkpoints can hold that too. A hook with an
attribute `elementwise` that is true promises the same result for any buckets: `bucket_size="auto"` tries sizes only
with such. One with an attribute `between_hosts` that is true is content with what `clcomm.compression.ranks.Ranks` has
of a Communicator, and with memory that is both gradient and out: where hosts add up in shared memory, it runs on the
first rank of each alone, and reduces these sums. One that can prepare what its calls do, on memory that stays, is a
`clcomm.compression.task.PreparedHook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from clcomm.buckets import Bucket
from clcomm.communicator import Communicator
from clcomm.compression.halves import BFloat16, Float16
from clcomm.compression.int8 import Int8
from clcomm.compression.powersgd import PowerSGD
from clcomm.compression.topk import TopK
from clcomm.errors import ArgumentError


class CommHook(Protocol):
    """What reduces a bucket's gradient in place of a plain all-reduce."""

    def __call__(self, gradient: np.ndarray, comm: Communicator, out: np.ndarray, bucket: Bucket) -> None: ...


@runtime_checkable
class StatefulHook(CommHook, Protocol):
    """A hook with a memory; flat: the model's flat gradients, which its buckets' gradients are parts of.

    It may have a method `check_state(layout, state)` too, which raises ArgumentError, changing nothing, for a state
    that `state_of` never returns for a model of this FlatLayout.
    """

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return what this rank keeps for the model, by the same names on every rank."""

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state_of` returned."""


def parse_compression(text: str) -> CommHook | None:
    """Return the hook for "fp16", "bf16", "int8", "topk:SHARE" or "powersgd:RANK"; None for "none"."""
    name, _, argument = text.partition(":") if isinstance(text, str) else ("", "", "")
    plain: dict[str, Callable[[], Any]] = {"none": lambda: None, "fp16": Float16, "bf16": BFloat16, "int8": Int8}
    try:
        if name in plain and text == name:
            return plain[name]()
        if name == "topk" and 0 < float(argument) <= 1:
            return TopK(float(argument))
        if name == "powersgd" and int(argument) >= 1:
            return PowerSGD(int(argument))
    except ValueError:
        pass
    raise ArgumentError(
        f"compression: expected none, fp16, bf16, int8, topk:SHARE with a share such as 0.01, or powersgd:RANK with a "
        f"rank such as 4, got {text!r}"
    )
