"""Where NaN and Inf in the ranks' gradients come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from clcomm.agreement import CHECKS
from clcomm.communicator import Communicator
from clcomm.errors import NonFiniteError
from clcomm.layout import FlatLayout, Slot

#: (parameter, NaNs, Infs)
Find = tuple[str, int, int]


def raise_non_finite(
    comm: Communicator, layout: FlatLayout, slots: Sequence[Slot], own: np.ndarray, mean: np.ndarray
) -> NoReturn:
    """Raise the same NonFiniteError on every rank, naming parameter and ranks; collective.

    own, mean: flat arrays of this rank's gradients and of the mean, of which some rank's holds NaN or Inf in `slots`.
    """
    finds = comm.all_gather_object((_first(layout, slots, own), _first(layout, slots, mean)), label=CHECKS)
    raise NonFiniteError(_describe([origin for origin, _ in finds], next((m for _, m in finds if m is not None), None)))


def _first(layout: FlatLayout, slots: Sequence[Slot], gradients: np.ndarray) -> Find | None:
    for slot in slots:
        gradient = layout.view(gradients, slot.name)
        nans, infs = int(np.isnan(gradient).sum()), int(np.isinf(gradient).sum())
        if nans or infs:
            return slot.name, nans, infs
    return None


def _describe(origins: list[Find | None], mean: Find | None) -> str:
    found = [
        f"{name!r} has {nans} NaN and {infs} Inf on rank {rank}"
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
