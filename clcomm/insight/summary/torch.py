"""The layers of PyTorch models, from forward hooks and PyTorch's own count of operations."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from clcomm.insight.summary.model_summary import Layer


def layers_of(model: torch.nn.Module, input_shape: tuple[int, ...]) -> list[Layer]:
    """Return a layer for each module without sub-modules, in the order of execution; a shared one is listed once."""
    calls: list[tuple[str, torch.nn.Module, object]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, result, name=name: calls.append((name, module, result)))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    was_training = {module: module.training for module in model.modules()}
    model.eval()  # leaves BatchNorm's running statistics unchanged
    try:
        forward, both = _count(model, input_shape)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in was_training.items():
            module.training = mode
    found: dict[str, Layer] = {}
    for name, module, result in calls:
        own = tuple(f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False))
        shape = tuple(result.shape[1:]) if isinstance(result, torch.Tensor) else None
        found.setdefault(
            name, Layer(name, type(module).__name__, shape, own, forward.get(name, 0), both.get(name, 0))
        )  # fmt: skip
    return list(found.values())


def _count(model: torch.nn.Module, input_shape: tuple[int, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Return each module's operations for one sample: forward, and forward and backward."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    x = torch.zeros(input_shape, dtype=parameters[0].dtype, device=parameters[0].device)
    counts = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            result = model(x)
            if backward:
                torch.autograd.grad(result.sum(), parameters, allow_unused=True)
        by_module = {
            name.partition(".")[2]: sum(each.values()) // input_shape[0]
            for name, each in counter.get_flop_counts().items()
            if name != "Global"
        }
        counts.append(by_module)
    return counts[0], counts[1]
