"""The Synchronizer's interface to a model: named parameters in one flat space, and copies between model and space."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import MISSING, ParameterSpec
from clcomm.comm.stats.events import Phase
from clcomm.comm.transport.reduction import Fold
from clcomm.sync.compression.coding import Codec


@dataclass(frozen=True)
class FlatArrays:
    """The flat space's memory: uint8 arrays of `layout.span` bytes."""

    #: This rank's parameters.
    params: np.ndarray
    #: This rank's own gradients, which the other ranks of its host may read.
    grads: np.ndarray
    #: The averaged gradients; common to all ranks of a host that share memory, so only the Synchronizer writes it. In a
    #: world of one it is `grads` itself.
    reduced: np.ndarray


#: The dtypes of parameters, and theirs in the flat space: half precision has no arithmetic in NumPy (bfloat16) or MPI
#: (both), and too few bits for a sum over ranks.
FLAT_DTYPES = {"float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "float32"}

#: Called with the name of a complete gradient; an action that it returns runs at that point of every backward.
OnComplete = Callable[[str], Callable[[], None] | None]


class Mark(Protocol):
    """A position in a device's queue."""

    #: Whether the commands before it compute without the host's cores.
    leaves_cores: bool

    @property
    def is_reached(self) -> bool:
        """Whether the device has completed everything before it."""

    def wait(self) -> None:
        """Block until it is reached."""


class RandomNumbers(Protocol):
    """The random numbers that a model's layers draw."""

    def turn_to(self, shard: int) -> None:
        """Draw a logical shard's numbers, the same on every rank that computes it, and go on where it ended."""

    def of_shard(self, shard: int) -> np.ndarray | None:
        """Return the state of the numbers that a shard has drawn from on this rank; None: it has not."""

    def load_shard(self, shard: int, state: np.ndarray) -> None:
        """Let a shard go on from a state that another rank's `of_shard` returned."""


class GradientMoves(Protocol):
    """Copies of gradients to and from flat arrays."""

    @property
    def codec(self) -> Codec | None:
        """Encodes gradients for compression on the model's device; None: NumPy does."""

    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy the gradients of `bucket.opening` to `arrays.grads`, marked; where there is none MISSING."""

    def send_gradients(self, bucket: Bucket, mark: Mark | None) -> None:
        """Copy like `pull_gradients`, once `mark` is reached; no backward may follow before `push_gradients`."""

    def push_gradients(self, bucket: Bucket) -> None:
        """Copy the gradients of `bucket.closing` from `arrays.reduced` to the model; none where no rank had one."""

    def moves_in_place(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return functions that pull and push all gradients where they lie in the arrays; None: they are copied."""


class ModelAdapter(GradientMoves, Protocol):
    """One rank's access to a model; `clcomm.sync.adapters` has an implementation for each library."""

    #: Trainable parameters, in the model's order.
    specs: tuple[ParameterSpec, ...]

    @property
    def fold(self) -> Fold | None:
        """Reduces over ranks on the model's device; None where the device offers no such kernels."""

    def record(self, synchronise: Callable[[], None]) -> bool:
        """Where the library records what runs now, have each run of it call `synchronise` here; return whether it does.

        `pull_gradients` then takes the gradients that this run has computed.
        """

    def count_copies(self, notify: Callable[[Phase], None]) -> None:
        """Report copies of parameters and `extra_state` between the host and another device as phases, to `notify`."""

    def require_unchanged(self) -> None:
        """Raise ArgumentError where parameters were replaced, frozen or unfrozen since the start; at every step."""

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Use this flat space from now on, values kept; called again when the memory moves."""

    def pull_parameters(self) -> None:
        """Copy the model's parameters to `arrays.params`."""

    def push_parameters(self) -> None:
        """Copy `arrays.params` to the model's parameters."""

    def has_gradients(self) -> bool:
        """Return whether any parameter has a gradient."""

    def drop_gradients(self) -> None:
        """Let the parameters have no gradients, as before a first backward."""

    def random_numbers(self) -> RandomNumbers | None:
        """Return the random numbers that the model's layers draw; None: the library's cannot be set."""

    def decides_bits(self) -> list[str]:
        """Return in words what of this process decides the bits of a batch's gradient."""

    def new_settings(self) -> dict[object, str]:
        """Return what optimizers have begun to step with, by references to them; who compares it clears it."""

    def seed(self) -> int | None:
        """Return what the library's random numbers began with; None: see `random_numbers`."""

    def shard_block(self, seed: int) -> AbstractContextManager[None]:
        """Return a block in which the library draws the numbers of this seed, and itself averages no gradients."""

    def set_aside(self) -> Callable[[], None]:
        """Let the parameters have no gradients; the function that is returned adds those that they had."""

    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that were written since they were pushed to `arrays.grads`; return their names."""

    def push_written(self, names: Sequence[str]) -> None:
        """Copy those gradients from `arrays.grads` to the model."""

    def watch_gradients(
        self, complete: OnComplete, begins: Callable[[], None] | None = None
    ) -> Callable[[], None] | None:
        """Call `complete(name)` as backward completes each gradient, then the action that it returned, if any.

        Where launches are recorded and replayed, `complete` is called in the recorded run only, and its action runs at
        the same point of each replay.

        Args:
            complete: called once per gradient and backward.
            begins: called before the first gradient of each backward, by libraries that report it.

        Returns a function that stops the calls; None: the library does not report completed gradients.
        """

    def mark(self) -> Mark | None:
        """Return a mark behind all queued commands; None if commands complete before their call returns."""

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return untrained state that must be equal on all ranks: frozen parameters, buffers."""

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore an `extra_state`."""

    def buffers(self) -> dict[str, np.ndarray]:
        """Return the part of `extra_state` that forward may change, such as running statistics."""

    def load_buffers(self, state: dict[str, np.ndarray]) -> None:
        """Restore all or some `buffers`."""


class CopyingAdapter:
    """Base of adapters that copy gradients to and from the flat space, by calls that block until it is done."""

    fold = codec = None
    _parameters: Mapping[str, Any]

    def count_copies(self, notify: Callable[[Phase], None]) -> None:
        """Report nothing: the library's arrays are in the host's memory, or it reports its own copies."""

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        self._layout, self._arrays = layout, arrays

    def _mark(self, bucket: Bucket, missing: Collection[str]) -> None:
        """Finish `pull_gradients` of a bucket, of which these gradients are missing here."""
        for name in missing:
            self._layout.view(self._arrays.grads, name)[...] = MISSING
        bucket.beginnings[0].mark(self._arrays.grads, missing)

    def _missing(self, bucket: Bucket) -> frozenset[str]:
        """Return the gradients of a bucket's that no rank has, once it is reduced."""
        return bucket.beginnings[1].missing(self._arrays.reduced)

    def record(self, synchronise: Callable[[], None]) -> bool:
        return False

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters.values())

    def drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def random_numbers(self) -> RandomNumbers | None:
        return None

    def decides_bits(self) -> list[str]:
        return []

    def new_settings(self) -> dict[object, str]:
        return {}

    def seed(self) -> int | None:
        return None

    def shard_block(self, seed: int) -> AbstractContextManager[None]:
        return nullcontext()

    def set_aside(self) -> Callable[[], None]:
        """Keep the gradients: the program writes those of its step over them."""
        return lambda: None

    def pull_gradients(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def send_gradients(self, bucket: Bucket, mark: Mark | None) -> None:
        self.pull_gradients(bucket)

    def moves_in_place(self) -> None:
        """Return None: gradients are copied."""

    def watch_gradients(
        self, complete: OnComplete, begins: Callable[[], None] | None = None
    ) -> Callable[[], None] | None:
        """Return None: the library does not report completed gradients."""

    def mark(self) -> None:
        """Return None: nothing is queued."""
