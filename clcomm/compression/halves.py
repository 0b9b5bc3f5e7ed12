"""Half the bytes: gradients as float16, or as the upper half of a float32 (bfloat16); no feedback."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from clcomm.bfloat16 import BFLOAT16
from clcomm.compression.coding import Coding, Work
from clcomm.compression.task import PreparedHook, Task


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
