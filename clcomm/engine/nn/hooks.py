"""Hooks of modules: functions called before and after `forward`, and in backward, as torch.nn.Module's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.modes import is_recording
from clcomm.engine.ops.shape import reshape
from clcomm.engine.tensor import Tensor

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
