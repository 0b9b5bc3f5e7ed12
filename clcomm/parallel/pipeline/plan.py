"""A pipeline's plan from the user's arguments: layers, schedule and cut, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clcomm.communicator import Communicator
from clcomm.engine.nn import Module
from clcomm.errors import ArgumentError, ClcommError, MismatchError
from clcomm.parallel.pipeline import cut as cuts
from clcomm.parallel.pipeline.layers import layers_of, parameter_costs, require_own_forwards
from clcomm.parallel.pipeline.stage import Names
from clcomm.schedules.pipeline import PipelineSchedule, pipeline_schedule
from clcomm.sync.agreement import CHECKS

#: In place of the first layer of each stage: equally many layers with parameters; equally many parameters.
LAYERS, PARAMETERS = "layers", "parameters"


def agreed_plan(
    comm: Communicator,
    model: Module,
    loss: object,
    asked: tuple[str, int, int],
    cut: str | Sequence[int],
    costs: Sequence[float] | None,
) -> tuple[list[Module], PipelineSchedule, list[int]]:
    """Return a model's layers, the schedule and the first layer of each stage, the same on every rank; collective."""
    found: object
    layers: list[Module] = []
    try:
        layers = layers_of(model)
        Names(model).require_all(layers)
        require_own_forwards(model, layers)
        if not callable(loss):
            raise ArgumentError(f"loss: expected a function of a result and its target, got {type(loss).__name__}")
        name, parts, chunks = asked
        schedule = pipeline_schedule(name, comm.size, parts, chunks)
        starts = _starts(layers, schedule, cut, costs)
        shapes = [(each, tensor.shape) for each, tensor in model._state().items()]
        found = f"{name}, {parts} micro-batches, {chunks} chunks, stages from {starts}", shapes
    except ClcommError as error:
        found = error
    everyone = comm.all_gather_object(found, label=CHECKS)
    _require_alike(comm, everyone)
    return layers, schedule, starts


def _require_alike(comm: Communicator, everyone: Sequence[Any]) -> None:
    """Raise the first rank's error, or one for ranks that differ, on every rank."""
    for rank, found in enumerate(everyone):
        if isinstance(found, ClcommError):
            alone = not all(isinstance(each, ClcommError) for each in everyone)
            raise type(found)(f"{found} (on {comm.name_ranks([rank])})" if alone else str(found))
    for rank, (plan, shapes) in enumerate(everyone):
        if plan != everyone[0][0]:
            first = f"{everyone[0][0]} on {comm.name_ranks([0])}"
            raise MismatchError(
                f"pipeline: expected the same on every rank, got {first}; {plan} on {comm.name_ranks([rank])}"
            )
        if shapes != everyone[0][1]:
            raise MismatchError(
                f"model: expected the same on every rank, got other parameters on {comm.name_ranks([0, rank])}"
            )


def _starts(
    layers: Sequence[Module], schedule: PipelineSchedule, cut: str | Sequence[int], costs: Sequence[float] | None
) -> list[int]:
    if costs is not None or cut != LAYERS:
        cuts.require_enough(len(layers), schedule.stages, schedule.chunks)
    if costs is not None:
        if cut != LAYERS:
            raise ArgumentError(f"costs: expected None with cut={cut!r}, got {len(costs)} costs")
        if len(costs) != len(layers):
            raise ArgumentError(f"costs: expected one for each of {len(layers)} layers, got {len(costs)}")
        return cuts.by_cost(costs, schedule.stages)
    if isinstance(cut, str):
        if cut not in (LAYERS, PARAMETERS):
            raise ArgumentError(f"cut: expected 'layers', 'parameters' or the first layer of each stage, got {cut!r}")
        if cut == LAYERS:
            return cuts.by_number(
                [next(each.parameters(), None) is not None for each in layers], schedule.stages, schedule.chunks
            )
        return cuts.by_cost(parameter_costs(layers), schedule.stages)
    return cuts.checked(cut, len(layers), schedule.stages)
