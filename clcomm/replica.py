"""How the Synchronizer sees a model: named parameters in one flat space, and what moves between model and space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clcomm.buckets import Bucket
from clcomm.compression.coding import Codec
from clcomm.layout import FlatLayout, ParameterSpec
from clcomm.transport.reduction import Fold


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


#: Called with the name of a gradient that is complete; what it returns is run at that place of every backward.
OnComplete = Callable[[str], Callable[[], None] | None]


class Mark(Protocol):
    """A place in a device's queue. leaves_cores: whether what computes there needs none of the host's cores."""

    leaves_cores: bool

    @property
    def is_reached(self) -> bool:
        """Whether the device has done everything before it."""

    def wait(self) -> None:
        """Return when it has."""


class Replica(Protocol):
    """One rank's copy of a model, whatever library it was written with; `clcomm.adapters` holds one class for each."""

    #: Trainable parameters, in the model's order.
    specs: tuple[ParameterSpec, ...]

    @property
    def fold(self) -> Fold | None:
        """What makes sums over ranks on the model's device; None where it has none for that."""

    @property
    def codec(self) -> Codec | None:
        """What codes gradients for compression on the model's device; None where NumPy does."""

    def require_unchanged(self) -> None:
        """Raise ArgumentError where the model has other parameters than at first, or trains others; at every step."""

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Take the flat space that the parameters live in from now on, values kept; again where the memory moves."""

    def pull_parameters(self) -> None:
        """Make `arrays.params` hold the model's parameters."""

    def push_parameters(self) -> None:
        """Make the model's parameters those in `arrays.params`."""

    def pull_gradients(self, bucket: Bucket) -> None:
        """Make `arrays.grads` hold the gradients that open in the bucket; a missing one counts as zero."""

    def send_gradients(self, bucket: Bucket, mark: Mark | None) -> None:
        """As `pull_gradients`, as soon as `mark` is reached; no backward may follow before `push_gradients`."""

    def push_gradients(self, bucket: Bucket) -> None:
        """Give the model those gradients in `arrays.reduced` that close in the bucket, missing ones included."""

    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that were written since they were pushed to `arrays.grads`, and return their names."""

    def push_written(self, names: Sequence[str]) -> None:
        """Give the model those gradients from `arrays.grads`."""

    def moves_in_place(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return what pulls and what pushes all gradients, where they lie in the arrays; None where they are copied."""

    def watch_gradients(
        self, complete: OnComplete, begins: Callable[[], None] | None = None
    ) -> Callable[[], None] | None:
        """Call `complete(name)` as backward completes each gradient, and then what it returns, if anything.

        begins: called before the first of these in each backward, by libraries that can tell.

        Where launches are recorded and queued again, `complete` is called in the recorded run alone, and what it
        returned then is run at the same place of each replay. Returns what ends this; None: the library can't tell.
        """

    def mark(self) -> Mark | None:
        """Return a mark behind all that is queued; None where nothing is, as what was called is done already."""

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return what is not trained but must be alike on all ranks: frozen parameters, buffers."""

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `extra_state` returned."""
