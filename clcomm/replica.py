"""How the Synchronizer sees a model: named parameters in one flat space, and what moves between model and space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clcomm.layout import Bucket, FlatLayout, ParameterSpec


@dataclass(frozen=True)
class FlatArrays:
    """The flat space's memory: uint8 arrays of `layout.span` bytes.

    params: this rank's parameters. grads: this rank's own gradients, which the other ranks of the host may read.
    reduced: the averaged gradients; one memory for all ranks of a host where they share any, so that only the
    Synchronizer writes it. In a world of one it is `grads` itself.
    """

    params: np.ndarray
    grads: np.ndarray
    reduced: np.ndarray


class Replica(Protocol):
    """One rank's copy of a model, whatever library it was written with; `clcomm.adapters` holds one class for each."""

    #: Trainable parameters, in the model's order.
    specs: tuple[ParameterSpec, ...]

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Take the flat space that the parameters live in from now on, values kept; again where the memory moves."""

    def pull_parameters(self) -> None:
        """Make `arrays.params` hold the model's parameters."""

    def push_parameters(self) -> None:
        """Make the model's parameters those in `arrays.params`."""

    def pull_gradients(self, bucket: Bucket) -> None:
        """Make the bucket's range of `arrays.grads` hold the model's gradients; a missing one counts as zero."""

    def push_gradients(self, bucket: Bucket) -> None:
        """Make the model's gradients those in the bucket's range of `arrays.reduced`, missing ones included."""

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return what is not trained but must be alike on all ranks: frozen parameters, buffers."""

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `extra_state` returned."""
