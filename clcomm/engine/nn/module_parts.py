"""The parts of a module by their names, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor

AnyModule = TypeVar("AnyModule")  # Module, whose file imports this one
Own = TypeVar("Own", bound="ModuleParts[Any]")
Found = TypeVar("Found")


class ModuleParts(Generic[AnyModule]):
    """What a Module, which derives from this class, has of its sub-modules, parameters and buffers."""

    _modules: dict[str, Any]
    _parameters: dict[str, Parameter]
    _buffers: dict[str, Tensor | None]
    named_modules: Callable[..., Iterator[tuple[str, AnyModule]]]
    named_parameters: Callable[[], Iterator[tuple[str, Parameter]]]
    to: Callable[..., AnyModule]

    def modules(self) -> Iterator[AnyModule]:
        """Yield this module and all inside it, each once."""
        for _, module in self.named_modules():
            yield module

    def named_children(self) -> Iterator[tuple[str, AnyModule]]:
        """Yield (name, module) of the modules that are attributes of this one."""
        yield from self._modules.items()

    def children(self) -> Iterator[AnyModule]:
        """Yield the modules that are attributes of this one."""
        yield from self._modules.values()

    def apply(self: Own, function: Callable[[Any], Any]) -> Own:
        """Call a function with each module inside this one, and then with this one; return the module."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def requires_grad_(self: Own, requires_grad: bool = True) -> Own:
        """Set `requires_grad` of all parameters; return the module."""
        for _, parameter in self.named_parameters():
            parameter.requires_grad = requires_grad
        return self

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Make a parameter, or None, the attribute `name`."""
        setattr(self, name, parameter)

    def add_module(self, name: str, module: AnyModule | None) -> None:
        """Make a module, or None, the attribute `name`."""
        setattr(self, name, module)

    register_module = add_module

    def get_submodule(self, target: str) -> AnyModule:
        """Return the module of a dotted name, this one of ""; ArgumentError where there is none."""
        return _one_of(dict(self.named_modules()), target, "module")

    def get_parameter(self, target: str) -> Parameter:
        """Return the parameter of a dotted name; ArgumentError where there is none."""
        prefix, _, name = target.rpartition(".")
        holder: Any = self.get_submodule(prefix)
        own: dict[str, Parameter | None] = holder._parameters
        return _one_of(own, name, "parameter")

    def get_buffer(self, target: str) -> Tensor:
        """Return the buffer of a dotted name; ArgumentError where there is none."""
        prefix, _, name = target.rpartition(".")
        holder: Any = self.get_submodule(prefix)
        own: dict[str, Tensor | None] = holder._buffers
        return _one_of(own, name, "buffer")

    # -- type and place, which stay

    def float(self: Own) -> Own:
        """Return the module, whose values are float32."""
        return self

    def cpu(self: Own) -> Own:
        """Return the module, which stays on its device."""
        return self

    def cuda(self, device: object = None) -> AnyModule:
        """Return the module if it is on a GPU; ArgumentError where it is not."""
        return self.to("gpu")

    def half(self) -> NoReturn:
        """Raise ArgumentError: values are float32; parameters may be stored in 16 bits."""
        raise ArgumentError("module: expected float32, the type of all values, got another; see clcomm.GradScaler")

    double = bfloat16 = half

    # -- text

    def extra_repr(self) -> str:
        """Return the text of the module's own, by default the shapes of its parameters."""
        own = {**self._parameters, **self._buffers}
        return ", ".join(f"{name} {list(each.shape)}" for name, each in own.items() if each is not None)

    def __repr__(self) -> str:
        children = [f"({name}): {child!r}" for name, child in self._modules.items()]
        lines = [self.extra_repr()] * bool(self.extra_repr()) + children
        if not children:
            return f"{type(self).__name__}({''.join(lines)})"
        inside = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {inside}\n)"


def _one_of(known: Mapping[str, Found | None], name: str, kind: str) -> Found:
    found = known.get(name)
    if found is None:
        raise ArgumentError(f"{kind}: expected one of {', '.join(known) or 'none'}, got {name!r}")
    return found
