"""A quarter of the bytes: 8-bit integers with a scale for each block, and error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from clcomm.compression.coding import Coding, Work, chars_nbytes
from clcomm.compression.exchange import prepare_exchange
from clcomm.compression.feedback import COPIES_DIFFER, Feedback, require_known
from clcomm.compression.task import PreparedHook, Task
from clcomm.flat_space.layout import FlatLayout


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
