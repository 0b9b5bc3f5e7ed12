"""The origin of NaN and Inf in the ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np

from clcomm.base.errors import NonFiniteError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterRange
from clcomm.comm.communicator import Communicator
from clcomm.sync.agreement import CHECKS

#: (parameter, NaNs, Infs)
NonFinite = tuple[str, int, int]


def raise_non_finite(
    comm: Communicator, layout: FlatLayout, ranges: Sequence[ParameterRange], own: np.ndarray, mean: np.ndarray
) -> NoReturn:
    """Raise the same NonFiniteError on every rank, naming parameter and ranks; collective.

    own, mean: flat arrays of this rank's gradients and of the mean, of which some rank's holds NaN or Inf in `ranges`.
    """
    first = [first_non_finite(ranges, [layout.view(flat, place.name) for place in ranges]) for flat in (own, mean)]
    raise_found(comm, *first)


def raise_found(comm: Communicator, own: NonFinite | None, mean: NonFinite | None) -> NoReturn:
    """Raise the same NonFiniteError on every rank, from what each found in its own and in the mean; collective."""
    found = comm.all_gather_object((own, mean), label=CHECKS)
    in_mean = next((theirs for _, theirs in found if theirs is not None), None)
    raise NonFiniteError(_describe([theirs for theirs, _ in found], in_mean, comm.name_ranks))


def first_non_finite(ranges: Sequence[ParameterRange], gradients: Iterable[np.ndarray]) -> NonFinite | None:
    """Return the first parameter whose array, all of its gradient or a part, holds NaN or Inf, with their numbers."""
    for place, gradient in zip(ranges, gradients, strict=True):
        nans, infs = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        if nans or infs:
            return place.name, nans, infs
    return None


def _describe(origins: list[NonFinite | None], mean: NonFinite | None, name_of: Callable[[Sequence[int]], str]) -> str:
    found = [
        f"{name!r} has {nans} NaN and {infs} Inf on {name_of([rank])}"
        for rank, origin in enumerate(origins)
        if origin is not None
        for name, nans, infs in [origin]
    ]
    if not found and mean is not None:
        found = [f"{mean[0]!r} overflows when the ranks' finite gradients are compressed or added"]
    return (
        f"gradient: expected finite numbers, but {', '.join(found)}; "
        "lower the learning rate or look at that rank's batch"
    )
