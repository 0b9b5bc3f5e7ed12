"""A pipeline's plan from the user's arguments: layers with their costs, schedule and cut, the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, ClcommError, MismatchError
from clcomm.base.schedules.pipeline import PipelineSchedule, pipeline_schedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.modes import no_grad
from clcomm.engine.nn import Module, Sequential
from clcomm.engine.nn.module import evaluating
from clcomm.engine.tensor import Tensor
from clcomm.parallel.pipeline.stage import Names
from clcomm.sync.agreement import CHECKS

COSTS = "costs"
#: In place of the first layer of each stage: equally many layers with parameters; equally many parameters.
LAYERS, PARAMETERS = "layers", "parameters"


def require_enough(layers: int, stages: int, chunks: int = 1, kind: str = "layers") -> None:
    """Raise ArgumentError, with the numbers, where there are more stages than layers."""
    if layers < stages:
        product = f" ({stages // chunks} ranks x {chunks} chunks)" if chunks > 1 else ""
        raise ArgumentError(f"stages: expected at most one for each of {layers} {kind}, got {stages} stages{product}")


def cut_by_number(has_parameters: Sequence[bool], stages: int, chunks: int = 1) -> list[int]:
    """Return the first layer of each stage; stages have as many layers with parameters, to within one.

    A layer without parameters, such as an activation, stays with the one before it.
    """
    counted = [number for number, has in enumerate(has_parameters) if has]
    require_enough(len(counted), stages, chunks, "layers with parameters")
    return [0, *(counted[-(-len(counted) * stage // stages)] for stage in range(1, stages))]


def cut_by_cost(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first layer of each stage, with the most expensive stage as cheap as possible.

    costs: of each layer, in any unit, from 0 up. Raises ArgumentError for others.
    """
    if any(isinstance(cost, bool) or not isinstance(cost, Real) or not 0 <= cost < math.inf for cost in costs):
        raise ArgumentError(f"costs: expected numbers from 0 up, got {list(costs)}")
    layers = len(costs)
    require_enough(layers, stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    # most[n]: the highest cost of a stage where the first n layers are cut into the stages so far
    most, cuts = [sums[n] if n else math.inf for n in range(layers + 1)], []
    for stage in range(1, stages):
        begins = [0] * (layers + 1)
        following = [math.inf] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for begin in range(stage, end):
                cost = max(most[begin], sums[end] - sums[begin])
                if cost < following[end]:
                    following[end], begins[end] = cost, begin
        most = following
        cuts.append(begins)
    starts, end = [], layers
    for begins in reversed(cuts):
        end = begins[end]
        starts.append(end)
    return [0, *reversed(starts)]


def checked_cut(starts: Sequence[int], layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage as given by the user; ArgumentError for an invalid cut."""
    found = list(starts)
    is_cut = len(found) == stages and all(isinstance(at, Integral) and not isinstance(at, bool) for at in found)
    if not is_cut or found[0] != 0 or any(a >= b for a, b in pairwise([*found, layers])):
        raise ArgumentError(
            f"cut: expected the first layer of each of {stages} stages, from 0 and growing, below {layers}, got {found}"
        )
    return [int(at) for at in found]


def layers_of(model: object) -> list[Module]:
    """Return the modules that compute a model one after another.

    They are a Sequential's, or the result of `model.pipeline_layers()`: modules whose parameters and buffers are
    the model's. Raises ArgumentError for other models.
    """
    offered: Callable[[], Sequence[Module]] | None = getattr(model, "pipeline_layers", None)
    if offered is not None:
        layers = list(offered())
    elif isinstance(model, Sequential):
        layers = list(model)
    else:
        raise ArgumentError(
            f"model: expected a Sequential, or a Module with pipeline_layers(), got {type(model).__name__}"
        )
    if not layers or not all(isinstance(layer, Module) for layer in layers):
        got = ", ".join(type(layer).__name__ for layer in layers) or "none"
        raise ArgumentError(f"pipeline_layers: expected modules, got {got}")
    return layers


def require_own_forwards(model: Module, layers: Sequence[Module]) -> None:
    """Raise ArgumentError if a module around the layers has its own `forward`, which stages would leave out."""
    inside = {id(each) for layer in layers for _, each in layer.named_modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and "forward" in module.__dict__:
            raise ArgumentError(
                f"model: expected layers that compute alone, got {name or type(model).__name__!r} around some of them "
                "with a forward of its own, such as SequenceParallel's; divide the sequence in each layer"
            )


def parameter_costs(layers: Sequence[Module]) -> list[float]:
    """Return the number of each layer's trainable values, a rough estimate of its cost."""
    return [float(layer.parameter_count()) for layer in layers]


def measured_costs(model: Module, sample: object, comm: Communicator | None = None, repeats: int = 3) -> list[float]:
    """Return the seconds of each layer's forward and backward, for `Pipeline(costs=...)`.

    Rank 0 measures and all ranks get its figures, so that all cut alike: `comm` holds all ranks of the job, not those
    of one axis. Collective. The model computes as in evaluation, and its parameters' gradients are dropped.

    Args:
        sample: a micro-batch of inputs.
        comm: the ranks; None: this one.
        repeats: runs of each layer; the shortest time counts.
    """
    costs = _measured(model, sample, repeats) if comm is None or comm.rank == 0 else []
    return costs if comm is None else comm.broadcast_object(costs, label=COSTS)


def _measured(model: Module, sample: object, repeats: int) -> list[float]:
    layers = layers_of(model)
    device = next(model.parameters()).device
    x = sample if isinstance(sample, Tensor) else Tensor(np.asarray(sample), device)
    costs = []
    with evaluating(model):
        for layer in layers:
            costs.append(min(_seconds(layer, x) for _ in range(repeats + 1)))  # the first run builds kernels
            with no_grad():
                x = layer(x)
    model.zero_grad()
    return costs


def _seconds(layer: Module, x: Tensor) -> float:
    leaf = x.detach()
    leaf.requires_grad = leaf.dtype == np.float32
    x.device.finish()
    began_s = time.perf_counter()
    y = layer(leaf)
    if y.requires_grad:
        y.backward(1.0)
    x.device.finish()
    return time.perf_counter() - began_s


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
        require_enough(len(layers), schedule.stages, schedule.chunks)
    if costs is not None:
        if cut != LAYERS:
            raise ArgumentError(f"costs: expected None with cut={cut!r}, got {len(costs)} costs")
        if len(costs) != len(layers):
            raise ArgumentError(f"costs: expected one for each of {len(layers)} layers, got {len(costs)}")
        return cut_by_cost(costs, schedule.stages)
    if isinstance(cut, str):
        if cut not in (LAYERS, PARAMETERS):
            raise ArgumentError(f"cut: expected 'layers', 'parameters' or the first layer of each stage, got {cut!r}")
        if cut == LAYERS:
            return cut_by_number(
                [next(each.parameters(), None) is not None for each in layers], schedule.stages, schedule.chunks
            )
        return cut_by_cost(parameter_costs(layers), schedule.stages)
    return checked_cut(cut, len(layers), schedule.stages)
