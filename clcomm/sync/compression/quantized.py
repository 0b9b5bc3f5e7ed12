"""Gradients as float16, as bfloat16, or as 8-bit integers with a scale for each block and error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.host.arrays import BFLOAT16, aligned_zeros
from clcomm.comm.collectives.arguments import address_of
from clcomm.sync.compression import coding
from clcomm.sync.compression.coding import Work
from clcomm.sync.compression.ranks import PreparedHook, Task, prepare_exchange

# --- Error feedback: the error of a lossy scheme is added to the next step's gradient (Karimireddy et al., 2019). ---

#: Why a scheme that looks at a bucket's elements together does not go with tensor parallelism.
COPIES_DIFFER = "what it rounds off a parameter depends on others, so that tensor-parallel ranks' copies would differ"


class RemembersFlat(PreparedHook):
    """A hook that keeps one number for each gradient of a model, zero at first, such as a residual.

    Numbers belong to places in the flat space, and survive new buckets.

    Attributes:
        kept: their name in a state.
        has_plain_padding: whether the bytes between the parameters are 0; else they may be a number -0.
    """

    kept = "residual"
    has_plain_padding = True

    def __init__(self) -> None:
        self._numbers: dict[int, np.ndarray] = {}  # as bytes, by model

    def kept_of(self, task: Task) -> np.ndarray:
        """Return the numbers of a task's bucket, to be read and written; zeros before the first step.

        Where the task has all of the model's gradients, every call returns the same memory; else a bucket beyond the
        end of the memory moves all numbers to larger memory.
        """
        bucket, gradient, flat = task.bucket, task.gradient, task.flat
        numbers = self._bytes_of(model_of(gradient, bucket), bucket.stop if flat is None else flat.nbytes)
        return numbers[bucket.start : bucket.stop].view(gradient.dtype)

    def _bytes_of(self, base: int, nbytes: int) -> np.ndarray:
        """Return a model's memory, enlarged to at least `nbytes`, values kept."""
        kept = self._numbers.get(base)
        if kept is None or kept.size < nbytes:
            grown = aligned_zeros(nbytes)
            if kept is not None:
                grown[: kept.size] = kept
            kept = self._numbers[base] = grown
        return kept

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's state of the model with gradients in `flat`, for a checkpoint."""
        result = np.zeros(flat.nbytes, np.uint8)
        kept = self._numbers.get(address_of(flat), result)
        result[: kept.size] = kept
        return {self.kept: result}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray], known: Collection[str] = ()) -> None:
        """Raise ArgumentError unless `state` holds finite numbers of this layout, with plain padding.

        known: the other entries that it may have.
        """
        found = checked_entry(state, self.kept, np.dtype(np.uint8), (layout.span,))
        padding = found.copy()
        for place in layout.ranges:
            padding[place.start : place.stop] = 0
            if not np.isfinite(layout.view(found, place.name)).all():
                expected = f"finite numbers, got others for {place.name!r}"
                raise ArgumentError(f"state_dict[{self.kept!r}]: expected {expected}")
        if padding.any() and self.has_plain_padding:
            raise ArgumentError(f"state_dict[{self.kept!r}]: expected zeros between the parameters, got something else")
        require_known(state, {self.kept, *known})

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state_of`."""
        values = state[self.kept]
        self._bytes_of(address_of(flat), flat.nbytes)[: values.size] = values


def model_of(gradient: np.ndarray, bucket: Bucket) -> int:
    """Return a key for a bucket's model: the fixed address of its flat gradients."""
    return address_of(gradient) - bucket.start


def checked_entry(
    state: Mapping[str, np.ndarray], name: str, dtype: np.dtype, shape: tuple[int | None, ...]
) -> np.ndarray:
    """Return a state's array of this name; ArgumentError unless it has this dtype and shape, None: any length."""
    array = state.get(name)
    found = "nothing" if array is None else f"{array.dtype} {array.shape}"
    if array is None or array.dtype != dtype or len(array.shape) != len(shape):
        raise ArgumentError(f"state_dict[{name!r}]: expected {_described(dtype, shape)}, got {found}")
    if any(wanted not in (None, length) for wanted, length in zip(shape, array.shape, strict=True)):
        raise ArgumentError(f"state_dict[{name!r}]: expected {_described(dtype, shape)}, got {found}")
    return array


def _described(dtype: np.dtype, shape: tuple[int | None, ...]) -> str:
    return f"{dtype} ({', '.join('any' if length is None else str(length) for length in shape)})"


def require_known(state: Mapping[str, np.ndarray], known: set[str]) -> None:
    """Raise ArgumentError for an entry that is not in `known`."""
    unknown = sorted(set(state) - known)
    if unknown:
        raise ArgumentError(f"state_dict: expected the entries {sorted(known)}, got {unknown[0]!r} too")


# --- Gradients as float16, as bfloat16, or as 8-bit integers with a scale for each block and error feedback ---


class _Halves(PreparedHook):
    """Gradients are divided by the number of ranks and summed in rank order as 16-bit numbers."""

    elementwise = between_hosts = True
    _dtype: np.dtype
    _encode: Callable[[np.ndarray, np.ndarray, int], None]
    _decode: Callable[[np.ndarray, np.ndarray], None]

    def prepare(self, task: Task) -> Work:
        ranks, nbytes, codec = task.ranks, 2 * task.gradient.size, task.codec
        own, total = (make(nbytes).view(self._dtype) for make in (ranks.allocate, ranks.allocate_common))
        parts = [
            coding.prepared(codec, self._encode, task.gradient, own, ranks.size),
            ranks.all_reduce_init(own, out=total),
            coding.prepared(codec, self._decode, total, task.out),
        ]

        def run() -> None:
            for part in parts:
                part()

        return run


class Float16(_Halves):
    """Gradients are sent and summed as float16, divided by the number of ranks first to avoid overflow."""

    _dtype = np.dtype(np.float16)
    _encode, _decode = staticmethod(coding.to_halves), staticmethod(coding.from_halves)

    def __str__(self) -> str:
        return "fp16"


class BFloat16(_Halves):
    """Gradients are sent as bfloat16 and summed as float32 in rank order; the sum is rounded to bfloat16."""

    _dtype = BFLOAT16
    _encode, _decode = staticmethod(coding.to_bfloat16), staticmethod(coding.from_bfloat16)

    def __str__(self) -> str:
        return "bf16"


class Int8(RemembersFlat):
    """Each block is scaled to [-127, 127]; the rounding error is added to the next step's gradient."""

    between_hosts = True
    refuses_parts = COPIES_DIFFER

    def prepare(self, task: Task) -> Work:
        gradient, kept = task.gradient, self.kept_of(task)
        return prepare_exchange(
            task.ranks, coding.chars_nbytes(gradient.size), np.uint8,
            lambda rows, rank: coding.prepared(task.codec, coding.to_chars, gradient, kept, rows, rank),
            lambda rows: coding.prepared(task.codec, coding.mean_of_chars, rows, task.out),
        )  # fmt: skip

    def __str__(self) -> str:
        return "int8"


# --- Top-k: only the largest gradients are sent, the rest stays in the residual (Deep Gradient Compression). ---
# From Lin et al. (2018): the residual, and the warm-up of the share: 25%, 6.25%, 1.56%, ... down to the given one.
# Their momentum correction is left out: it lost accuracy in trials.

#: Default number of steps of the warm-up, divided equally among its shares.
WARM_UP_STEPS = 100


class TopK(RemembersFlat):
    """Each rank sends a share of a bucket's elements, those of the largest magnitude, with their indices.

    warm_up: number of first steps with larger shares, a quarter at first.
    """

    between_hosts = True
    refuses_parts = COPIES_DIFFER

    def __init__(self, share: float, warm_up: int = WARM_UP_STEPS):
        super().__init__()
        self.share, self.warm_up = share, warm_up
        self._stages = [0.25**power for power in range(1, 33) if 0.25**power > share] or [share]
        self._steps: dict[tuple[int, int], int] = {}

    def share_at(self, step: int) -> float:
        """Return the share for a step, counted from 0."""
        return self._stages[step * len(self._stages) // self.warm_up] if step < self.warm_up else self.share

    def prepare(self, task: Task) -> Work:
        gradient, kept = task.gradient, self.kept_of(task)
        size, dtype = gradient.size, gradient.dtype
        key, chosen = (model_of(gradient, task.bucket), task.bucket.start), 0
        exchange: Work = lambda: None  # noqa: E731

        def run() -> None:
            nonlocal chosen, exchange
            count = math.ceil(self._next_share(key) * size)
            if count != chosen:
                chosen, nbytes = count, coding.largest_nbytes(count, dtype)
                exchange = prepare_exchange(
                    task.ranks, nbytes, np.uint8,
                    lambda rows, rank: coding.prepared(task.codec, coding.to_largest, gradient, kept, rows, rank),
                    lambda rows: coding.prepared(task.codec, coding.mean_of_largest, rows, task.out),
                )  # fmt: skip
            exchange()

        return run

    def _next_share(self, key: tuple[int, int]) -> float:
        step = self._steps.get(key, 0)
        self._steps[key] = step + 1
        return self.share_at(step)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        base = address_of(flat)
        steps = [(start, step) for (model, start), step in self._steps.items() if model == base]
        return super().state_of(flat) | {"steps": np.array(steps, np.int64).reshape(-1, 2)}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray], known: Collection[str] = ()) -> None:
        super().check_state(layout, state, {"steps"})
        steps = checked_entry(state, "steps", np.dtype(np.int64), (None, 2))
        starts = {place.start for place in layout.ranges}
        if not starts.issuperset(steps[:, 0].tolist()) or len(set(steps[:, 0].tolist())) < len(steps):
            raise ArgumentError("state_dict['steps']: expected the starts of different buckets, got others")
        if (steps[:, 1] < 0).any():
            raise ArgumentError(f"state_dict['steps']: expected numbers from 0 up, got {steps[:, 1].min()}")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        super().load_state_of(flat, state)
        self._steps.update({(address_of(flat), start): step for start, step in state["steps"].tolist()})

    def __str__(self) -> str:
        return f"topk:{self.share:g}"
