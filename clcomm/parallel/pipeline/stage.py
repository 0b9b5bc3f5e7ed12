"""This rank's part of a model: the layers of its stages, with the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.communicator import Communicator
from clcomm.engine.nn import Module
from clcomm.engine.nn.containers import fused
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.optim.flat_state import ITEM, NAMES, SIZES, order_of
from clcomm.parallel.tensor_parallel.shards import divided_state, gathered_state


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


class Stage:
    """Consecutive layers."""

    def __init__(self, number: int, layers: Sequence[Module]):
        self.number, self._layers = number, list(layers)

    def __call__(self, x: Tensor) -> Tensor:
        for run in fused(self._layers):
            x = run(x)
        return x


def tied_parameters(stages: Sequence[Sequence[Module]]) -> Iterator[tuple[int, list[int]]]:
    """Yield each parameter that several stages have, by its `id`, with the numbers of these stages, in their order."""
    users: dict[int, list[int]] = {}
    for number, layers in enumerate(stages):
        for parameter in {id(each) for layer in layers for each in layer.parameters()}:
            users.setdefault(parameter, []).append(number)
    order = [id(each) for layers in stages for layer in layers for each in layer.parameters()]
    yield from ((each, users[each]) for each in dict.fromkeys(order) if len(users[each]) > 1)


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
        shared: the ranks of each shared parameter, in the same order on every rank.
        own: this rank's of them, by their place in `shared`.
    """

    def __init__(self, comm: Communicator, shared: Sequence[Sequence[int]], own: Mapping[int, Parameter]):
        self._comm = comm
        self._groups: list[tuple[Communicator, Parameter, np.ndarray, np.ndarray]] = []
        self._follows: set[int] = set()
        parts: dict[tuple[int, ...], Communicator | None] = {}
        for number, ranks in enumerate(shared):
            members = tuple(ranks)
            if members not in parts:
                color = 0 if comm.rank in members else None
                parts[members] = comm.split(color, name=f"tied {'-'.join(map(str, members))}")
            part = parts[members]
            if part is not None:
                parameter = own[number]
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
            if gradient is None:
                mine[...] = 0
            else:
                mine[...] = gradient.numpy().reshape(-1)
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
    own = {name: [size, *(state[kind][at] for kind in buffers)] for name, (at, size) in _places(state).items()}
    everyone = comm.all_gather_object(own, label=_STATE)
    found = {name: values for part in reversed(everyone) for name, values in part.items()}
    return {**state, **_laid_out(found, [name for name in names if name in found], buffers)}


def own_state(optimizer: Any, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return this rank's part of a whole model's state, for the optimizer's `load_state_dict`.

    Raises ArgumentError for a state without this rank's parameters.
    """
    buffers = [name for name in _buffers(optimizer) if name in state]
    places = _places(state) if {NAMES, SIZES} <= state.keys() else {}
    inner = getattr(optimizer, "optimizer", optimizer)
    own = [place.name for place in reversed(inner.space.layout.ranges)]
    missing = [name for name in own if name not in places]
    if missing:
        raise ArgumentError(f"state_dict: expected the whole model's parameters, got none named {missing[0]}")
    parts: dict[str, list[Any]] = {}
    for name in own:
        at, size = places[name]
        parts[name] = [size, *(np.asarray(state[kind])[at] for kind in buffers)]
    return divided_state(optimizer, {**state, **_laid_out(parts, own, buffers)})


def _buffers(optimizer: Any) -> Sequence[str]:
    names: Sequence[str] = getattr(optimizer, "optimizer", optimizer).state_names
    return names


def _places(state: Mapping[str, np.ndarray]) -> dict[str, tuple[slice, int]]:
    """Return where each parameter's elements are in a state's buffers, and their number."""
    pairs = list(zip(state[NAMES].tolist(), state[SIZES].tolist(), strict=True))
    layout = FlatLayout([ParameterSpec(name, (size,)) for name, size in reversed(pairs)])
    return {place.name: (slice(place.start // ITEM, place.stop // ITEM), place.spec.size) for place in layout.ranges}


def _laid_out(
    parts: Mapping[str, Sequence[Any]], names: Sequence[str], buffers: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return the buffers of parameters in a model's order, and the entries that tell it.

    parts: the number of elements of each parameter, and then those of each buffer.
    """
    layout = FlatLayout([ParameterSpec(name, (parts[name][0],)) for name in names])
    state = order_of(layout, range(len(names) - 1, -1, -1))
    for number, kind in enumerate(buffers, 1):
        values = state[kind] = np.zeros(layout.span // ITEM, np.float32)
        for place in layout.ranges:
            values[place.start // ITEM : place.stop // ITEM] = parts[place.name][number]
    return state
