"""Error feedback: what a lossy scheme leaves out of one step is added to the next (Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.task import Task
from clcomm.errors import ArgumentError
from clcomm.host_memory import aligned_zeros
from clcomm.layout import FlatLayout


class FlatMemory:
    """Values that a scheme keeps for each element of a model's gradients, zero at first; one flat array for each model.

    They belong to places in the flat space, so they stay when the space is cut into other buckets.
    """

    def __init__(self) -> None:
        self._kept: dict[int, np.ndarray] = {}

    def of(self, gradient: np.ndarray, bucket: Bucket, flat: np.ndarray | None = None) -> np.ndarray:
        """Return what is kept for a bucket's elements, to be read and written.

        It is the same memory each time where `flat`, all of the model's gradients, tells how much there will be.
        """
        kept = self._bytes_of(model_of(gradient, bucket), bucket.stop if flat is None else flat.nbytes)
        return kept[bucket.start : bucket.stop].view(gradient.dtype)

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Return what is kept for all of a model's gradients, as bytes; `flat` is where these lie."""
        result = np.zeros(flat.nbytes, np.uint8)
        kept = self._kept.get(address(flat), result)
        result[: kept.size] = kept
        return result

    def load(self, flat: np.ndarray, values: np.ndarray) -> None:
        """Take over what `whole` returned."""
        self._bytes_of(address(flat), flat.nbytes)[: values.size] = values

    def _bytes_of(self, base: int, nbytes: int) -> np.ndarray:
        """Return at least so many bytes of a model, with what was kept before."""
        kept = self._kept.get(base)
        if kept is None or kept.size < nbytes:
            grown = aligned_zeros(nbytes)
            if kept is not None:
                grown[: kept.size] = kept
            kept = self._kept[base] = grown
        return kept


class Feedback:
    """Each bucket's residual: what this rank wanted to send so far, less what it sent."""

    def __init__(self) -> None:
        self._residuals = FlatMemory()

    def residual_of(self, task: Task) -> np.ndarray:
        """Return what has not been sent yet, to be read and written; zeros before the first step. See FlatMemory.of."""
        return self._residuals.of(task.gradient, task.bucket, task.flat)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's residuals of the model whose gradients lie in `flat`, for a checkpoint."""
        return {"residual": self._residuals.whole(flat)}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless `state` holds residuals for a model of this layout, and nothing between them."""
        residual = checked_entry(state, "residual", np.dtype(np.uint8), (layout.span,))
        padding = residual.copy()
        for slot in layout.slots:
            padding[slot.start : slot.stop] = 0
            if not np.isfinite(layout.view(residual, slot.name)).all():
                raise ArgumentError(f"state_dict['residual']: expected finite numbers, got others for {slot.name!r}")
        if padding.any():
            raise ArgumentError("state_dict['residual']: expected zeros between the parameters, got something else")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state_of` returned."""
        self._residuals.load(flat, state["residual"])


def address(flat: np.ndarray) -> int:
    """Return where an array starts."""
    return flat.__array_interface__["data"][0]


def model_of(gradient: np.ndarray, bucket: Bucket) -> int:
    """Return what tells a model from others: where its flat gradients start, which stays."""
    return address(gradient) - bucket.start


def checked_entry(
    state: Mapping[str, np.ndarray], name: str, dtype: np.dtype, shape: tuple[int | None, ...]
) -> np.ndarray:
    """Return a state's array of this name; ArgumentError unless it has this dtype and shape, None: any length."""
    array = state.get(name)
    found = "nothing" if array is None else f"{array.dtype} {array.shape}"
    if array is None or array.dtype != dtype or len(array.shape) != len(shape):
        raise ArgumentError(f"state_dict[{name!r}]: expected {_in_words(dtype, shape)}, got {found}")
    if any(wanted not in (None, length) for wanted, length in zip(shape, array.shape, strict=True)):
        raise ArgumentError(f"state_dict[{name!r}]: expected {_in_words(dtype, shape)}, got {found}")
    return array


def _in_words(dtype: np.dtype, shape: tuple[int | None, ...]) -> str:
    return f"{dtype} ({', '.join('any' if length is None else str(length) for length in shape)})"


def require_known(state: Mapping[str, np.ndarray], known: set[str]) -> None:
    """Raise ArgumentError for an entry of a state that is none of these."""
    strange = sorted(set(state) - known)
    if strange:
        raise ArgumentError(f"state_dict: expected the entries {sorted(known)}, got {strange[0]!r} too")
