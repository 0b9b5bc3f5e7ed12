"""This rank's part of a model: the layers of its stages, with the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn import Module
from clcomm.engine.nn.sequential import fused
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor


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
