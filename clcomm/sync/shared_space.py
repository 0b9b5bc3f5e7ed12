"""A model's flat space in the Communicator's memory: the arrays that ranks reduce, and the adapter that fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.adapters import adapter_of
from clcomm.adapters.adapter import FlatArrays, ModelAdapter
from clcomm.communicator import Communicator
from clcomm.errors import ArgumentError, ClcommError
from clcomm.flat_space.layout import FlatLayout
from clcomm.flat_space.precision import FLOAT32, Precision
from clcomm.sync.agreement import require_agreement

if TYPE_CHECKING:
    from clcomm.engine.flat import FlatSpace


class SharedSpace:
    """A model's adapter with its flat space in the Communicator's memory; making one is collective.

    arrays: the flat arrays, of `layout.span` bytes as float32. padded: the same memory up to equal shards for all
    ranks. shards: what has divided the memory between the ranks; None: nothing has.
    MismatchError is raised on every rank where the ranks' parameters differ in name, shape, dtype or precision.

    precision: what parameters are stored in.
    """

    def __init__(self, comm: Communicator, model: object, precision: Precision = FLOAT32):
        self.model = model  # kept, so that no other model can get its id
        self.shards: Any = None
        self.padded: FlatArrays
        self.arrays: FlatArrays
        self.adapter = _adapter_on_all(comm, model, precision)
        self.adapter.count_copies(comm.notify_phase)
        if self.adapter.fold is not None:
            comm.fold_with(self.adapter.fold)
        comm.fold_on_cpu()
        self.layout = FlatLayout(self.adapter.specs)
        self.shard_nbytes = self.layout.shard_nbytes(comm.size)
        whole = comm.size * self.shard_nbytes
        grads = comm.allocate(whole)
        reduced = grads if comm.size == 1 else comm.allocate_common(whole)
        self.move(FlatArrays(comm.allocate(self.precision.nbytes(whole)), grads, reduced))

    @property
    def flat_space(self) -> FlatSpace | None:
        """The engine's flat space, which lies on the arrays; None for another library's model."""
        return getattr(self.adapter, "flat_space", None)

    @property
    def precision(self) -> Precision:
        """What the parameters are stored in."""
        return FLOAT32 if self.flat_space is None else self.flat_space.precision

    @property
    def params_nbytes(self) -> int:
        """Bytes of the parameters as they are stored, without padding."""
        return self.precision.nbytes(self.layout.nbytes)

    def mixing_layers(self) -> list[Any]:
        """Return the model's layers whose backward adds up gradients of several ranks, such as SyncBatchNorm."""
        named: Any = getattr(self.model, "named_modules", tuple)
        return [each for _, each in named() if getattr(type(each), "mixes_ranks", None) and each.mixes_ranks]

    def layers_over_shards(self) -> list[Any]:
        """Return the model's layers that compute with the batches of all ranks or shards, of whichever library."""
        named: Any = getattr(self.model, "named_modules", tuple)
        return [each for _, each in named() if any(c.__name__ == "SyncBatchNorm" for c in type(each).__mro__)]

    @property
    def has_parameters(self) -> bool:
        """Whether this rank has all parameters, and not a shard of them."""
        return bool(self.arrays.params.size)

    def drop_gradients(self) -> None:
        """Release the arrays of gradients, of which each rank keeps a shard from now on."""
        none = np.empty(0, np.uint8)
        self.padded = FlatArrays(self.padded.params, none, none)
        self.arrays = FlatArrays(self.arrays.params, none, none)

    def drop_parameters(self) -> None:
        """Release the array of parameters too."""
        none = np.empty(0, np.uint8)
        self.padded = self.arrays = FlatArrays(none, none, none)

    def attach(self) -> None:
        """Let the model live in these arrays; its values are kept."""
        self.adapter.attach(self.layout, self.arrays)

    def move(self, padded: FlatArrays) -> None:
        """Let the flat space live in other memory, as large as `padded`; its values are kept."""
        span = self.layout.span
        self.padded = padded
        params = padded.params[: self.precision.nbytes(span)]
        self.arrays = FlatArrays(params, padded.grads[:span], padded.reduced[:span])
        self.attach()


def _adapter_on_all(comm: Communicator, model: object, precision: Precision) -> ModelAdapter:
    """Return the model's adapter; every rank raises where one refuses model or precision, or the parameters differ."""
    refusal = None
    try:
        adapter = adapter_of(model)
        _store(adapter, model, precision)
        stored = "" if precision.is_full else f" stored in {precision}"
        lines = [f"{spec.name} {spec.shape} {spec.dtype}{stored}" for spec in adapter.specs]
    except ClcommError as error:
        refusal, lines = error, [str(error)]
    flat: FlatSpace | None = None if refusal is not None else getattr(adapter, "flat_space", None)
    family = "" if flat is None else flat.device.family
    are_alike = require_agreement(comm, "parameters", lines, "build the same model on every rank", family)
    if refusal is not None:
        raise refusal
    if flat is not None:
        flat.has_alike_devices = are_alike
    return adapter


def _store(adapter: ModelAdapter, model: object, precision: Precision) -> None:
    """Store the model's parameters in a precision; ArgumentError for another library's model."""
    if precision.is_full:
        return
    flat: FlatSpace | None = getattr(adapter, "flat_space", None)
    if flat is None:
        raise ArgumentError(
            f"precision: expected float32 for other libraries' models, which store their parameters themselves, got "
            f"{precision} for {type(model).__name__}"
        )
    flat.store_in(precision)
