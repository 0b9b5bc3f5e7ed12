"""Top-k: only the largest gradients are sent, the rest stays in the residual (Deep Gradient Compression).

From Lin et al. (2018): the residual, and the warm-up of the share: 25%, 6.25%, 1.56%, ... down to the given one. Their
momentum correction is left out: it lost accuracy in trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.comm.collectives.arguments import address_of
from clcomm.sync.compression.coding import Coding, Work, largest_nbytes
from clcomm.sync.compression.exchange import prepare_exchange
from clcomm.sync.compression.feedback import COPIES_DIFFER, Feedback, checked_entry, model_of, require_known
from clcomm.sync.compression.task import PreparedHook, Task

#: Default number of steps of the warm-up, divided equally among its shares.
WARM_UP_STEPS = 100


class TopK(PreparedHook):
    """Each rank sends a share of a bucket's elements, those of the largest magnitude, with their indices.

    warm_up: number of first steps with larger shares, a quarter at first.
    """

    between_hosts = True
    refuses_parts = COPIES_DIFFER

    def __init__(self, share: float, warm_up: int = WARM_UP_STEPS):
        self.share, self.warm_up = share, warm_up
        self.feedback = Feedback()
        self._stages = [0.25**power for power in range(1, 33) if 0.25**power > share] or [share]
        self._steps: dict[tuple[int, int], int] = {}

    def share_at(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        return self._stages[step * len(self._stages) // self.warm_up] if step < self.warm_up else self.share

    def prepare(self, task: Task) -> Work:
        gradient, coding = task.gradient, Coding(task.codec)
        encode = partial(coding.to_largest, gradient, self.feedback.residual_of(task))
        decode = partial(coding.mean_of_largest, out=task.out)
        size, dtype = gradient.size, gradient.dtype
        key, chosen = (model_of(gradient, task.bucket), task.bucket.start), 0
        exchange: Work = lambda: None  # noqa: E731

        def run() -> None:
            nonlocal chosen, exchange
            count = math.ceil(self._next_share(key) * size)
            if count != chosen:
                chosen, nbytes = count, largest_nbytes(count, dtype)
                exchange = prepare_exchange(task.ranks, nbytes, np.uint8, encode, decode)
            exchange()

        return run

    def _next_share(self, key: tuple[int, int]) -> float:
        step = self._steps.get(key, 0)
        self._steps[key] = step + 1
        return self.share_at(step)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        base = address_of(flat)
        steps = [(start, step) for (model, start), step in self._steps.items() if model == base]
        return self.feedback.state_of(flat) | {"steps": np.array(steps, np.int64).reshape(-1, 2)}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        self.feedback.check_state(layout, state)
        steps = checked_entry(state, "steps", np.dtype(np.int64), (None, 2))
        require_known(state, {"residual", "steps"})
        starts = {place.start for place in layout.ranges}
        if not starts.issuperset(steps[:, 0].tolist()) or len(set(steps[:, 0].tolist())) < len(steps):
            raise ArgumentError("state_dict['steps']: expected the starts of different buckets, got others")
        if (steps[:, 1] < 0).any():
            raise ArgumentError(f"state_dict['steps']: expected numbers from 0 up, got {steps[:, 1].min()}")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self.feedback.load_state_of(flat, state)
        self._steps.update({(address_of(flat), start): step for start, step in state["steps"].tolist()})

    def __str__(self) -> str:
        return f"topk:{self.share:g}"
