"""Error feedback: the error of a lossy scheme is added to the next step's gradient (Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.collectives.arguments import address_of
from clcomm.sync.compression.task import Task

#: Why a scheme that looks at a bucket's elements together does not go with tensor parallelism.
COPIES_DIFFER = "what it rounds off a parameter depends on others, so that tensor-parallel ranks' copies would differ"


class FlatMemory:
    """One value for each element of a model's gradients, zero at first; one flat array per model.

    Values belong to places in the flat space, and survive new buckets.
    """

    def __init__(self) -> None:
        self._kept: dict[int, np.ndarray] = {}

    def of(self, gradient: np.ndarray, bucket: Bucket, flat: np.ndarray | None = None) -> np.ndarray:
        """Return the values of a bucket's elements, to be read and written.

        With `flat`, all of the model's gradients, every call returns the same memory; without it, a bucket beyond the
        end of the memory moves all values to larger memory.
        """
        kept = self._bytes_of(model_of(gradient, bucket), bucket.stop if flat is None else flat.nbytes)
        return kept[bucket.start : bucket.stop].view(gradient.dtype)

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Return a model's values as bytes; flat: its gradients."""
        result = np.zeros(flat.nbytes, np.uint8)
        kept = self._kept.get(address_of(flat), result)
        result[: kept.size] = kept
        return result

    def load(self, flat: np.ndarray, values: np.ndarray) -> None:
        self._bytes_of(address_of(flat), flat.nbytes)[: values.size] = values

    def _bytes_of(self, base: int, nbytes: int) -> np.ndarray:
        """Return a model's memory, enlarged to at least `nbytes`, values kept."""
        kept = self._kept.get(base)
        if kept is None or kept.size < nbytes:
            grown = aligned_zeros(nbytes)
            if kept is not None:
                grown[: kept.size] = kept
            kept = self._kept[base] = grown
        return kept


class Feedback:
    """Error feedback: each bucket's residual is the sum of the gradients so far minus the sum of the sent ones."""

    def __init__(self) -> None:
        self._residuals = FlatMemory()

    def residual_of(self, task: Task) -> np.ndarray:
        """Return the residual of a task's bucket, to be read and written; zeros before the first step."""
        return self._residuals.of(task.gradient, task.bucket, task.flat)

    def state_of(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return this rank's residuals of the model with gradients in `flat`, for a checkpoint."""
        return {"residual": self._residuals.whole(flat)}

    def check_state(self, layout: FlatLayout, state: Mapping[str, np.ndarray]) -> None:
        """Raise ArgumentError unless `state` holds residuals of this layout, with zeros in the padding."""
        residual = checked_entry(state, "residual", np.dtype(np.uint8), (layout.span,))
        padding = residual.copy()
        for place in layout.ranges:
            padding[place.start : place.stop] = 0
            if not np.isfinite(layout.view(residual, place.name)).all():
                raise ArgumentError(f"state_dict['residual']: expected finite numbers, got others for {place.name!r}")
        if padding.any():
            raise ArgumentError("state_dict['residual']: expected zeros between the parameters, got something else")

    def load_state_of(self, flat: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self._residuals.load(flat, state["residual"])


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
