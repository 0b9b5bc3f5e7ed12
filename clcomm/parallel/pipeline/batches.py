"""A step's arrays: batches that all ranks have compared, cut into micro-batches, and what these become on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError, ClcommError, MismatchError
from clcomm.base.schedules.pipeline import PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.device import Device
from clcomm.engine.modes import no_grad
from clcomm.engine.nn.module import Module, evaluating
from clcomm.engine.tensor import FLOAT32, Shape, Tensor
from clcomm.parallel.pipeline.link import ACTIVATIONS, GRADIENTS, LinkPlan
from clcomm.parallel.pipeline.stage import run_layers
from clcomm.sync.agreement import CHECKS, digest

#: Bounds the memory for different batches.
_MOST_KINDS = 256


class Kind(NamedTuple):
    """An array's shape, and its dtype as text."""

    shape: Shape
    dtype: str


class MicroBatches:
    """A batch in parts of equal size, each brought to the device when it is needed."""

    def __init__(self, values: Any, count: int, device: Device):
        if isinstance(values, Tensor) and values.dtype == np.int32:  # the engine takes parts of float32 alone
            values = values.numpy()
        self._values, self._size, self._device = values, values.shape[0] // count, device

    def __getitem__(self, number: int) -> Tensor:
        part = self._values[number * self._size : (number + 1) * self._size]
        return part if isinstance(part, Tensor) else Tensor(part, self._device)


class BatchCheck:
    """Compares the ranks' batches, by hashes alone once batches of these kinds have passed."""

    def __init__(self, comm: Communicator, micro_batches: int):
        self._comm, self._micro_batches = comm, micro_batches
        self._agreed: dict[bytes, Kind] = {}

    def agreed(self, inputs: object, targets: object, needs_targets: bool) -> Kind:
        """Return the kind of the pipeline's micro-batches of inputs; collective.

        Raises:
            ArgumentError: the first rank has no inputs or the last one no targets, or the batch cannot be cut; on every
                rank.
            MismatchError: ranks that have inputs, or targets, have different ones; on every rank.
        """
        own = _kind_of("inputs", inputs), _kind_of("targets", targets), needs_targets
        rows = self._comm.all_gather(np.frombuffer(digest(repr(own).encode()), np.uint8), label=CHECKS)
        key = rows.tobytes()
        if key not in self._agreed:
            if len(self._agreed) >= _MOST_KINDS:
                self._agreed.clear()
            self._agreed[key] = self._checked(*zip(*self._comm.all_gather_object(own, label=CHECKS), strict=True))
        return self._agreed[key]

    def _checked(
        self, inputs: Sequence[Kind | None], targets: Sequence[Kind | None], needs_targets: Sequence[bool]
    ) -> Kind:
        name_ranks, parts = self._comm.name_ranks, self._micro_batches
        if len({*needs_targets}) > 1:
            training = [rank for rank, needs in enumerate(needs_targets) if needs]
            raise MismatchError(
                f"pipeline: expected the same call on every rank, got one with targets on {name_ranks(training)} alone"
            )
        for name, kinds, needed_on in ("inputs", inputs, 0), ("targets", targets, len(targets) - 1):
            known = {rank: kind for rank, kind in enumerate(kinds) if kind is not None}
            if len({*known.values()}) > 1:
                text = "; ".join(f"{kind} on {name_ranks([rank])}" for rank, kind in known.items())
                raise MismatchError(
                    f"{name}: expected the same shape and dtype on every rank that has them, got {text}"
                )
            if needed_on not in known and (kinds is inputs or needs_targets[0]):
                raise ArgumentError(f"{name}: expected an array on {name_ranks([needed_on])}, got None")
        first, last = inputs[0], targets[-1]
        assert first is not None
        size = first.shape[0]
        if size % parts:
            raise ArgumentError(f"inputs: expected a batch that {parts} micro-batches divide, got {size} samples")
        if last is not None and last.shape[0] != size:
            raise ArgumentError(f"targets: expected {size}, one for each input, got {last.shape[0]}")
        return Kind((size // parts, *first.shape[1:]), first.dtype)


def _kind_of(name: str, values: object) -> Kind | None:
    if values is None:
        return None
    if not isinstance(values, (np.ndarray, Tensor)) or not values.ndim or not values.shape[0]:
        got = f"shape {values.shape}" if hasattr(values, "shape") else type(values).__name__
        raise ArgumentError(f"{name}: expected an array or a Tensor of samples, got {got}")
    is_whole = values.dtype.kind in "iu"
    return Kind(tuple(values.shape), np.dtype(np.int32 if is_whole else np.float32).str)


def planned_links(
    comm: Communicator,
    device: Device,
    schedule: PipelineSchedule,
    stages: Mapping[int, Sequence[Module]],
    part: Module,
    kind: Kind,
) -> list[LinkPlan]:
    """Return the links between all stages; collective. Each stage but the last runs once on zeros, as in evaluation.

    Args:
        stages: the layers of this rank's, by number.
        part: the module that holds their parameters.
        kind: of the pipeline's micro-batches of inputs.

    Raises a stage's error for its input on every rank.
    """
    plans = []
    for stage in range(schedule.stages - 1):
        here, there = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        found: Kind | ClcommError | None = None
        if stage in stages:
            try:
                with no_grad(), evaluating(part):
                    y = run_layers(stages[stage], Tensor(np.zeros(*kind), device))
                found = Kind(tuple(y.shape), y.dtype.str)
            except ClcommError as error:
                found = error
        found = comm.broadcast_object(found, here, label="shapes")
        if isinstance(found, ClcommError):
            raise type(found)(f"stage {stage}: {found}")
        assert found is not None
        kind = found
        plans.append(LinkPlan(ACTIVATIONS, stage, here, there, schedule.slots[stage + 1].activations, *kind))
        if np.dtype(kind.dtype) == FLOAT32:  # indices have no gradient
            plans.append(LinkPlan(GRADIENTS, stage, there, here, schedule.slots[stage].gradients, *kind))
    return plans
