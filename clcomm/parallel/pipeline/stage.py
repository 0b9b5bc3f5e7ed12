"""This rank's part of a model: the layers of its stages, with the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.schedules.pipeline import PipelineSchedule
from clcomm.comm.communicator import Communicator
from clcomm.engine.nn import Module
from clcomm.engine.nn.containers import fused
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.parallel.tensor_parallel.shards import divided_state, elements_of, gathered_state, laid_out


class ModelPart(Module):
    """A module with the parameters and buffers of some layers, under their names in the whole model.

    So `state_dict()` holds a part of the model's, and name patterns mean the same. It computes nothing.
    """

    def __init__(self, model: Module, layers: Iterable[Module]):
        names = Names(model)
        for layer in layers:
            self._add(layer, names)

    def _add(self, module: Module, names: Names) -> None:
        """Add a module of the model, or the modules inside it; parameters shared with an earlier one have its names."""
        path = names.modules.get(id(module))
        if path and all(names.of(each) == f"{path}.{name}" for name, each in module.named_parameters()):
            self._attach(path, module)
            return
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self._attach(names.of(tensor), tensor)
        for child in module._modules.values():
            self._add(child, names)

    def _attach(self, path: str, member: Module | Tensor) -> None:
        *folders, name = path.split(".")
        place: Module = self
        for folder in folders:
            if folder not in place._modules:
                setattr(place, folder, Module())
            place = place._modules[folder]
        if isinstance(member, (Module, Parameter)):
            setattr(place, name, member)  # the same one again where layers share it
        elif name not in place._buffers:
            place.register_buffer(name, member)


class Names:
    """The dotted names of a model's modules, parameters and buffers, by the identity of these."""

    def __init__(self, model: Module):
        self.modules = {id(module): name for name, module in model.named_modules()}
        self._tensors = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}

    def of(self, tensor: Tensor) -> str:
        return self._tensors[id(tensor)]

    def require_all(self, layers: Iterable[Module]) -> None:
        """Raise ArgumentError for layers with a parameter or buffer that is not the model's."""
        for layer in layers:
            for tensor in (*layer.parameters(), *layer.buffers()):
                if id(tensor) not in self._tensors:
                    raise ArgumentError(
                        f"pipeline_layers: expected the model's own parameters and buffers, got another of "
                        f"shape {tensor.shape}"
                    )


def run_layers(layers: Sequence[Module], x: Tensor) -> Tensor:
    """Return the result of consecutive layers."""
    for run in fused(layers):
        x = run(x)
    return x


def parameters_of(layers: Iterable[Module]) -> list[Parameter]:
    """Return the parameters of layers, each once."""
    return list({id(each): each for layer in layers for each in layer.parameters()}.values())


# --- Tied parameters: shared by layers of stages on several ranks; their gradients are summed. ---

TIED = "tied gradients"
#: The label of numbers about the whole model.
WHOLE = "whole model"


class TiedParameters:
    """This rank's parameters that other ranks share: the `Stages` of a parameter. Creating it is collective.

    After `sum_gradients` each has the sum of all its uses, with the same bits on each of its ranks: the ranks of a
    parameter begin alike and step alike. Where gradients add up over several steps of a pipeline, `begin_step` lets the
    first of a parameter's ranks keep the sum so far, and the others begin anew.

    Args:
        stages: the layers of all, in order.
    """

    def __init__(self, comm: Communicator, schedule: PipelineSchedule, stages: Sequence[Sequence[Module]]):
        self._comm = comm
        self._groups: list[tuple[Communicator, Parameter, np.ndarray, np.ndarray]] = []
        self._follows: set[int] = set()
        users: dict[int, tuple[Parameter, set[int]]] = {}
        for number, layers in enumerate(stages):
            for parameter in parameters_of(layers):
                users.setdefault(id(parameter), (parameter, set()))[1].add(schedule.rank_of(number))
        parts: dict[tuple[int, ...], Communicator | None] = {}
        for parameter, ranks in users.values():
            members = tuple(sorted(ranks))
            if len(members) > 1 and members not in parts:
                color = 0 if comm.rank in members else None
                parts[members] = comm.split(color, name=f"tied {'-'.join(map(str, members))}")
            part = parts.get(members)
            if part is not None:
                mine, total = part.allocate(parameter.nbytes), part.allocate_common(parameter.nbytes)
                self._groups.append((part, parameter, mine.view(np.float32), total.view(np.float32)))
                if part.rank:
                    self._follows.add(id(parameter))

    @property
    def are_here(self) -> bool:
        return bool(self._groups)

    def begin_step(self) -> None:
        """Drop the gradients that earlier steps have summed, on all ranks of a parameter but its first."""
        for _, parameter, _, _ in self._groups:
            if not self.counts(parameter) and parameter.grad is not None:
                parameter.grad = None

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over its ranks; collective."""
        for part, parameter, mine, total in self._groups:
            gradient = parameter.grad
            mine[...] = 0 if gradient is None else gradient.numpy().reshape(-1)
            part.all_reduce(mine, out=total, label=TIED)
            values = total.reshape(parameter.shape)
            if gradient is None:
                parameter.grad = Tensor(values, parameter.device)
            else:
                gradient.copy_from(values)

    def give_values(self) -> None:
        """Give every rank of a parameter the values of its first one; collective."""
        for part, parameter, mine, _ in self._groups:
            mine[...] = parameter.numpy().reshape(-1)
            part.broadcast(mine, label=TIED)
            parameter.copy_from(mine.reshape(parameter.shape))

    def counts(self, parameter: Parameter) -> bool:
        """Return whether a parameter counts here, and not on a rank before this one that has it too."""
        return id(parameter) not in self._follows

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        return self._comm.all_gather(own, label=WHOLE)


# --- An optimizer's state of one rank's stages, and that of the whole model. ---

_STATE = "optimizer state"


def whole_state(comm: Communicator, names: Iterable[str], optimizer: Any) -> dict[str, np.ndarray]:
    """Return the state that the optimizer of the whole model would have, on every rank; collective.

    Args:
        comm: the ranks of the stages.
        names: of the whole model's parameters, in its order; those that are not trained may be among them.
        optimizer: of this rank's parameters.
    """
    state, buffers = gathered_state(optimizer), _buffers(optimizer)
    everyone = comm.all_gather_object(elements_of(state, buffers), label=_STATE)
    found = {name: values for part in reversed(everyone) for name, values in part.items()}
    ordered = {name: found[name] for name in reversed([*names]) if name in found}  # in the order of backward
    return {**state, **laid_out(ordered, buffers)}


def own_state(optimizer: Any, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's part of a whole model's state, for the optimizer's `load_state_dict`.

    Raises ArgumentError for a state without this rank's parameters.
    """
    buffers = [name for name in _buffers(optimizer) if name in state]
    elements = elements_of(state, buffers)
    inner = getattr(optimizer, "optimizer", optimizer)
    own = [place.name for place in inner.space.layout.ranges]
    missing = [name for name in reversed(own) if name not in elements]
    if missing:
        raise ArgumentError(f"state_dict: expected the whole model's parameters, got none named {missing[0]}")
    return divided_state(optimizer, {**state, **laid_out({name: elements[name] for name in own}, buffers)})


def _buffers(optimizer: Any) -> Sequence[str]:
    names: Sequence[str] = getattr(optimizer, "optimizer", optimizer).state_names
    return names
