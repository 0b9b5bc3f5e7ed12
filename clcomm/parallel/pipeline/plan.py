"""A pipeline's plan from the user's arguments: layers with their costs, schedule and cut, the same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from numbers import Integral, Real

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules.pipeline import PipelineSchedule, pipeline_schedule
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.communicator import Communicator
from clcomm.engine.modes import no_grad
from clcomm.engine.nn import Module, Sequential
from clcomm.engine.nn.module import evaluating
from clcomm.engine.tensor import Tensor
from clcomm.parallel.pipeline.stage import Names
from clcomm.sync.agreement import require_agreement

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
    require_enough(len(costs), stages)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]

    @cache
    def cheapest(end: int, stages: int) -> tuple[float, list[int]]:
        """Return the cost of the most expensive of so many stages of the first `end` layers, and where they begin."""
        if stages == 1:
            return sums[end], [0]
        found = ((max(cheapest(at, stages - 1)[0], sums[end] - sums[at]), at) for at in range(stages - 1, end))
        cost, begin = min(found)
        return cost, [*cheapest(begin, stages - 1)[1], begin]

    return cheapest(len(costs), stages)[1]


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


@refused_on_all
def agreed_plan(
    comm: Communicator,
    model: Module,
    loss: object,
    asked: tuple[str, int, int],
    cut: str | Sequence[int],
    costs: Sequence[float] | None,
) -> tuple[list[Module], PipelineSchedule, list[int]]:
    """Return a model's layers, the schedule and the first layer of each stage, the same on every rank; collective."""
    layers = layers_of(model)
    Names(model).require_all(layers)
    require_own_forwards(model, layers)
    if not callable(loss):
        raise ArgumentError(f"loss: expected a function of a result and its target, got {type(loss).__name__}")
    name, parts, chunks = asked
    schedule = pipeline_schedule(name, comm.size, parts, chunks)
    starts = _starts(layers, schedule, cut, costs)
    lines = [f"{name}, {parts} micro-batches, {chunks} chunks, stages from {starts}"]
    lines += [f"{name} {tensor.shape}" for name, tensor in model._state().items()]
    require_agreement(comm, "pipeline", lines, "give every rank the same model and arguments")
    return layers, schedule, starts


def _starts(
    layers: Sequence[Module], schedule: PipelineSchedule, cut: str | Sequence[int], costs: Sequence[float] | None
) -> list[int]:
    stages, chunks = schedule.stages, schedule.chunks
    if costs is not None and cut != LAYERS:
        raise ArgumentError(f"costs: expected None with cut={cut!r}, got {len(costs)} costs")
    if costs is None and cut == LAYERS:
        return cut_by_number([next(each.parameters(), None) is not None for each in layers], stages, chunks)
    require_enough(len(layers), stages, chunks)
    if costs is None and cut == PARAMETERS:
        costs = parameter_costs(layers)
    if costs is not None:
        if len(costs) != len(layers):
            raise ArgumentError(f"costs: expected one for each of {len(layers)} layers, got {len(costs)}")
        return cut_by_cost(costs, stages)
    if isinstance(cut, str):
        raise ArgumentError(f"cut: expected 'layers', 'parameters' or the first layer of each stage, got {cut!r}")
    return checked_cut(cut, len(layers), stages)
