"""The parts of a module by their names, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.engine.modes import is_recording
from clcomm.engine.ops.shape import reshape
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


# --- Hooks of modules: functions called before and after `forward`, and in backward, as torch.nn.Module's. ---

#: When a hook is called.
BEFORE, AFTER, BACKWARD = "before", "after", "backward"


class HookHandle:
    """A function that a module calls before or after `forward`, or in backward, until `remove()`."""

    def __init__(self, module: Any, hook: Callable[..., Any], when: str):
        self._module, self.hook, self.when = module, hook, when
        self._set((*module.call_hooks, self))

    def remove(self) -> None:
        """Take the hook from its module."""
        self._set(tuple(each for each in self._module.call_hooks if each is not self))

    def _set(self, hooks: tuple[HookHandle, ...]) -> None:
        object.__setattr__(self._module, "call_hooks", hooks)
        self._module._note_change(self._module)


def call_with_hooks(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a module's result for these arguments, with its hooks called."""
    hooks = {when: [each.hook for each in module.call_hooks if each.when == when] for when in (BEFORE, AFTER, BACKWARD)}
    for hook in hooks[BEFORE]:
        changed = hook(module, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)

    def forward(*given: Any) -> Tensor:
        result: Tensor = module.forward(*given, **kwargs)
        for hook in hooks[AFTER]:
            changed = hook(module, given, result)
            result = result if changed is None else changed
        return result

    return _watched(module, hooks[BACKWARD], args, forward) if hooks[BACKWARD] else forward(*args)


def _watched(module: object, hooks: Sequence[Callable[..., Any]], args: tuple[Any, ...], call: Any) -> Tensor:
    """Return call(*args), whose gradients the hooks get in backward, with the module and those of the arguments.

    Raises ArgumentError for more than one argument that needs a gradient, and for a result that is no Tensor.
    """
    name = f"{type(module).__name__}: register_full_backward_hook"
    if not is_recording():
        return call(*args)  # type: ignore[no-any-return]
    places = [at for at, each in enumerate(args) if isinstance(each, Tensor) and each.requires_grad]
    if len(places) > 1:
        raise ArgumentError(f"{name}: expected at most one argument that needs a gradient, got {len(places)}")
    given, of_result = list(args), [None]
    at = places[0] if places else None
    if at is not None:
        given[at] = reshape(args[at], args[at].shape)  # a place on the tape for this call alone
    result = call(*given)
    if not isinstance(result, Tensor):
        raise ArgumentError(f"{name}: expected a module that returns a Tensor, got {type(result).__name__}")
    if not result.requires_grad:
        return result
    result = reshape(result, result.shape)

    def call_hooks(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        for hook in hooks:
            changed = hook(module, gradients, tuple(of_result))
            if changed is not None:
                changed = changed if isinstance(changed, tuple) else (changed,)
                if len(changed) != len(gradients):
                    raise ArgumentError(f"{name}: expected {len(gradients)} gradients, got {len(changed)}")
                gradients = changed
        return gradients

    def note(gradient: Any) -> None:
        of_result[0] = gradient
        if at is None:
            call_hooks((None,) * len(args))

    result.register_hook(note)
    if at is not None:
        before, behind = (None,) * at, (None,) * (len(args) - at - 1)
        given[at].register_hook(lambda gradient: call_hooks((*before, gradient, *behind))[at])
    return result
