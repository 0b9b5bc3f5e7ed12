"""A model's flat space in the Communicator's memory: the arrays that ranks reduce, and the adapter that fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import FLOAT32, Precision
from clcomm.comm.communicator import Communicator
from clcomm.sync.adapters import adapter_of
from clcomm.sync.adapters.adapter import FlatArrays, ModelAdapter
from clcomm.sync.agreement import CHECKS, require_agreement

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
        #: What each rank computes with, in words; one for all of them where they have the same.
        self.kinds: list[str]
        self.adapter, self.kinds = _adapter_on_all(comm, model, precision)
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
    def is_mixed(self) -> bool:
        """Whether ranks compute with several libraries or kinds of device, whose optimizers may round differently."""
        return len(self.kinds) > 1

    @property
    def has_several_libraries(self) -> bool:
        """Whether ranks have models of several libraries."""
        return len({kind.partition(",")[0] for kind in self.kinds}) > 1

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


def _adapter_on_all(comm: Communicator, model: object, precision: Precision) -> tuple[ModelAdapter, list[str]]:
    """Return the model's adapter, and what ranks compute with.

    Every rank raises where one refuses model or precision, or the parameters differ.
    """
    refusal, kind = None, ""
    try:
        adapter = adapter_of(model)
        _store(adapter, model, precision)
        stored = "" if precision.is_full else f" stored in {precision}"
        lines = [f"{spec.name} {spec.shape} {spec.dtype}{stored}" for spec in adapter.specs]
        kind = ", ".join([type(adapter).__name__, *adapter.decides_bits()])
    except ClcommError as error:
        refusal, lines = error, [str(error)]
    are_alike = require_agreement(comm, "parameters", lines, "build the same model on every rank", kind)
    if refusal is not None:
        raise refusal
    flat: FlatSpace | None = getattr(adapter, "flat_space", None)
    if flat is not None:
        flat.has_alike_devices = are_alike
    return adapter, [kind] if are_alike else comm.all_gather_object(kind, label=CHECKS)


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
