"""Training loops of PyTorch's models, and one process that averages all ranks' gradients by the formula.

It runs every rank's batches on one model, folds the gradients in rank order and divides: the same bits.
"""

from __future__ import annotations

import torch

from clcomm import Synchronizer

STEPS = 4


class Net(torch.nn.Module):
    """Shared, frozen, unused, narrow and complex parameters, beside plain ones."""

    def __init__(self, dtype=torch.float32, exotic=False):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(6, 5, sparse=exotic)
        self.first = torch.nn.Linear(5, 7)
        self.shared = torch.nn.Linear(7, 7)
        self.unused = torch.nn.Linear(3, 2)
        self.frozen = torch.nn.Linear(7, 7)
        self.to(dtype)
        if exotic:
            self.wave = torch.nn.Parameter(torch.randn(7, dtype=torch.complex64))
            self.narrow = torch.nn.Parameter(torch.randn(7).to(torch.bfloat16))
            self.last = torch.nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.frozen.requires_grad_(False)
        self.alias = self.shared

    def forward(self, x):
        x = torch.tanh(self.first(self.embedding(x)))
        x = torch.tanh(self.frozen(self.alias(torch.tanh(self.shared(x)))))
        if hasattr(self, "wave"):
            scale = torch.tanh(self.narrow.float() * self.last.square().mean())
            x = x * torch.tanh((self.wave * self.wave.conj()).real) + self.wave.imag * scale
        return x.square().mean()


def batch(rank, step, part):
    generator = torch.Generator().manual_seed(rank + 10 * step + 1000 * part)
    return torch.randint(6, (4,), generator=generator)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def mean_of(gradients):
    """The mean by the formula, in rank order, as bits; a missing gradient counts as zero, None if all are missing."""
    there = next((each for each in gradients if each is not None), None)
    if there is None:
        return None
    gradients = [torch.zeros_like(there) if each is None else each for each in gradients]
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total / len(gradients)


def wide(gradient, parameter):
    """A gradient as the ranks exchange it: dense, float32 where it was narrow."""
    if gradient is None:
        return None
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).detach().clone()
    return gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient


def reference(make, size, optimizer, set_to_none, parts, clip, **backward):
    """Train on one process as `size` ranks would; return the parameters and all gradients that `step` saw."""
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepper = OPTIMIZERS[optimizer](parameters)
    seen = []
    for step in range(STEPS):
        ranks = []
        for rank in range(size):
            model.zero_grad(set_to_none=set_to_none)
            for part in range(parts):
                model(batch(rank, step, part)).backward(**backward)
            ranks.append([wide(p.grad, p) for p in parameters])
        for parameter, gradients in zip(parameters, zip(*ranks, strict=True), strict=True):
            mean = mean_of(gradients)
            parameter.grad = None if mean is None else mean.to(parameter.dtype)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        seen.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])
        stepper.step()
    return model, seen


def ours(comm, make, optimizer, set_to_none, parts, clip, model=None, check=None, settings=None, **backward):
    """The same on this job's ranks."""
    model = make() if model is None else model
    parameters = [p for p in model.parameters() if p.requires_grad]
    sync = Synchronizer(comm, **(settings or {}))
    sync.broadcast_parameters(model)
    stepper = OPTIMIZERS[optimizer](parameters)
    seen = []
    for step in range(STEPS):
        stepper.zero_grad(set_to_none=set_to_none)
        with sync.no_sync():
            for part in range(parts - 1):
                model(batch(comm.rank, step, part)).backward(**backward)
        model(batch(comm.rank, step, parts - 1)).backward(**backward)
        sync.sync_gradients(model)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        seen.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])
        if check is not None:
            check(step, sync, model)
        stepper.step()
    return model, seen


def bits(tensor):
    return None if tensor is None else tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_bits(one, other):
    for step, (mine, theirs) in enumerate(zip(one[1], other[1], strict=True)):
        for index, (got, wanted) in enumerate(zip(mine, theirs, strict=True)):
            assert bits(got) == bits(wanted), f"gradient {index} at step {step}"
    for (name, got), wanted in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert bits(got) == bits(wanted), name
