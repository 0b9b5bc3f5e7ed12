"""Gradients as float16, as bfloat16, or as 8-bit integers with a scale for each block and error feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.host.bfloat16 import BFLOAT16
from clcomm.sync.compression.coding import Coding, Work, chars_nbytes
from clcomm.sync.compression.exchange import prepare_exchange
from clcomm.sync.compression.feedback import COPIES_DIFFER, Feedback, require_known
from clcomm.sync.compression.task import PreparedHook, Task


class _Halves(PreparedHook):
    """Gradients are divided by the number of ranks and summed in rank order as 16-bit numbers."""

    elementwise = between_hosts = True
    _dtype: np.dtype

    def prepare(self, task: Task) -> Work:
        ranks, nbytes, coding = task.ranks, 2 * task.gradient.size, Coding(task.codec)
        own, total = (make(nbytes).view(self._dtype) for make in (ranks.allocate, ranks.allocate_common))
        encode, decode = self._preparers(coding)
        parts = [encode(task.gradient, own, ranks.size), ranks.all_reduce_init(own, out=total), decode(total, task.out)]

        def run() -> None:
            for part in parts:
                part()

        return run

    @abstractmethod
    def _preparers(self, coding: Coding) -> tuple[Callable[..., Work], Callable[..., Work]]:
        """Return the methods of `coding` that prepare encoding and decoding."""


class Float16(_Halves):
    """Gradients are sent and summed as float16, divided by the number of ranks first to avoid overflow."""

    _dtype = np.dtype(np.float16)

    def _preparers(self, coding: Coding) -> tuple[Callable[..., Work], Callable[..., Work]]:
        return coding.to_halves, coding.from_halves

    def __str__(self) -> str:
        return "fp16"


class BFloat16(_Halves):
    """Gradients are sent as bfloat16 and summed as float32 in rank order; the sum is rounded to bfloat16."""

    _dtype = BFLOAT16

    def _preparers(self, coding: Coding) -> tuple[Callable[..., Work], Callable[..., Work]]:
        return coding.to_bfloat16, coding.from_bfloat16

    def __str__(self) -> str:
        return "bf16"


class Int8(PreparedHook):
    """Each block is scaled to [-127, 127]; the rounding error is added to the next step's gradient."""

    between_hosts = True
    refuses_parts = COPIES_DIFFER

    def __init__(self) -> None:
        self.feedback = Feedback()

    def prepare(self, task: Task) -> Work:
        gradient, coding = task.gradient, Coding(task.codec)
        encode = partial(coding.to_chars, gradient, self.feedback.residual_of(task))
        decode = partial(coding.mean_of_chars, out=task.out)
        return prepare_exchange(task.ranks, chars_nbytes(gradient.size), np.uint8, encode, decode)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        return self.feedback.state_of(flat)

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        self.feedback.check_state(layout, state)
        require_known(state, {"residual"})

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self.feedback.load_state_of(flat, state)

    def __str__(self) -> str:
        return "int8"
