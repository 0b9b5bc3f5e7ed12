"""A small model, its batches and optimizers, and the steps of one process that has all ranks' gradients."""

from __future__ import annotations

import copy

import torch

from tests.horovod.values import folded, tensor_of

STEPS = 3

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "groups": lambda parameters: (
        lambda all_: torch.optim.AdamW([{"params": all_[:2], "lr": 0.1}, {"params": all_[2:]}])
    )(list(parameters)),
}


def net(dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch_of(rank: int, step: int, dtype=torch.float32) -> torch.Tensor:
    return tensor_of(rank, (4, 6), torch.float64, step).to(dtype)


def gradients_of(model, rank: int, steps, dtype) -> list[torch.Tensor]:
    """Return what a rank's backwards of these steps add up to, a missing gradient being zero."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for step in steps:
        twin(batch_of(rank, step, dtype)).square().sum().backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in twin.parameters()]


def summed(gradients: list[torch.Tensor], op: str, halves: bool) -> torch.Tensor:
    """Return the reduced gradient: narrow ones as float32, unless halves were asked for."""
    dtype = gradients[0].dtype
    wide = torch.float16 if halves else torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return folded([each.to(wide) for each in gradients], op).to(dtype)


def bits_of(model) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def reference(kind, ranks, dtype, op, passes, halves):
    model = net(dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(STEPS):
        steps = range(step * passes, (step + 1) * passes)
        everyone = [gradients_of(model, rank, steps, dtype) for rank in range(ranks)]
        for parameter, own in zip(model.parameters(), zip(*everyone, strict=True), strict=True):
            parameter.grad = own[0] if ranks == 1 else summed(list(own), op, halves)
        optimizer.step()
    return model
