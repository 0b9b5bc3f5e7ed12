"""Learning rates of each scheduler, of several at once and after a change by hand, as PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import optim
from clcomm.base.errors import ArgumentError
from clcomm.engine import Parameter

#: Made of S, the module of schedulers, and o, the optimizer.
ALONE = (
    "S.StepLR(o, 3)", "S.StepLR(o, 2, 0.5)", "S.MultiStepLR(o, [2, 5, 5, 9], 0.3)", "S.ExponentialLR(o, 0.9)",
    "S.ConstantLR(o)", "S.ConstantLR(o, 0.5, 3)", "S.LinearLR(o)", "S.LinearLR(o, 0.1, 0.7, 8)",
    "S.PolynomialLR(o, 7, 2.0)",
    "S.CosineAnnealingLR(o, 6)", "S.CosineAnnealingLR(o, 6, 0.01)", "S.CosineAnnealingWarmRestarts(o, 3)",
    "S.CosineAnnealingWarmRestarts(o, 2, 2, 0.003)", "S.LambdaLR(o, lambda e: 0.95 ** e)",
    "S.LambdaLR(o, [lambda e: 1 / (1 + e), lambda e: 0.5])", "S.OneCycleLR(o, 0.3, 20)",
    "S.OneCycleLR(o, [0.3, 0.1], epochs=5, steps_per_epoch=4, anneal_strategy='linear', three_phase=True)",
    "S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=4), S.CosineAnnealingLR(o, 8)], [4])",
    "S.SequentialLR(o, [S.ConstantLR(o, 0.1, 2), S.ExponentialLR(o, 0.9), S.StepLR(o, 2)], [2, 6])",
)  # fmt: skip
CHAINED = (
    ("S.StepLR(o, 3)", "S.ExponentialLR(o, 0.9)"),
    ("S.LinearLR(o, 0.1, total_iters=4)", "S.MultiStepLR(o, [3, 6])"),
    ("S.ConstantLR(o, 0.5, 3)", "S.CosineAnnealingLR(o, 30)"),
)


def optimizers(torch, kind="SGD", **more):
    """Return ours and PyTorch's, each of two groups."""
    arrays = [np.ones(3, np.float32), np.ones(4, np.float32)]
    own, other = [Parameter(a) for a in arrays], [torch.nn.Parameter(torch.tensor(a)) for a in arrays]
    made = []
    for module, leaves in ((optim, own), (torch.optim, other)):
        groups = [{"params": leaves[:1]}, {"params": leaves[1:], "lr": 0.02}]
        made.append(getattr(module, kind)(groups, lr=0.1, **more))
    return made


def rates(optimizer):
    return [[group["lr"], *_momenta(group)] for group in optimizer.param_groups]


def _momenta(group):
    return [group["momentum"]] if "momentum" in group else list(group["betas"])


@pytest.mark.parametrize("texts", [*((text,) for text in ALONE), *CHAINED], ids=str)
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
def test_rates_are_pytorchs(torch, texts, changed):
    kind, more = ("Adam", {}) if "three_phase" in texts[0] else ("SGD", {"momentum": 0.9})
    both = optimizers(torch, kind, **more)
    modules = optim.lr_scheduler, torch.optim.lr_scheduler
    schedulers = [[eval(text, {"S": S, "o": o}) for text in texts] for S, o in zip(modules, both, strict=True)]
    for number in range(18):
        np.testing.assert_allclose(*map(rates, both), rtol=1e-6, atol=1e-12, err_msg=f"epoch {number}")
        np.testing.assert_allclose(*[each[-1].get_last_lr() for each in schedulers], rtol=1e-6, atol=1e-12)
        if changed and number == 2 and "OneCycle" not in texts[0] and "Lambda" not in texts[0]:
            for optimizer in both:
                optimizer.param_groups[0]["lr"] *= 0.5
        for each in schedulers:
            for scheduler in each:
                scheduler.step()
    own = eval(texts[0], {"S": optim.lr_scheduler, "o": optimizers(torch, kind, **more)[0]})
    own.load_state_dict(schedulers[0][0].state_dict())
    assert own.last_epoch == schedulers[0][0].last_epoch and own.get_last_lr() == schedulers[0][0].get_last_lr()


@pytest.mark.parametrize("text", [
    "S.ReduceLROnPlateau(o, patience=1)", "S.ReduceLROnPlateau(o, 'max', 0.5, 0, 0.1, 'abs', 2, [0.03, 0.0])",
])  # fmt: skip
def test_rates_fall_on_a_plateau_as_pytorchs(torch, text):
    both = optimizers(torch, momentum=0.9)
    modules = optim.lr_scheduler, torch.optim.lr_scheduler
    schedulers = [eval(text, {"S": S, "o": o}) for S, o in zip(modules, both, strict=True)]
    for value in (3.0, 2.0, 2.0, 1.9999, 2.5, 2.1, 1.0, 1.5, 1.05, 1.0, 0.9, 3.0, 3.05, 2.0):
        for scheduler in schedulers:
            scheduler.step(value)
        np.testing.assert_allclose(*map(rates, both), rtol=1e-6)


def test_refusals(torch):
    S, (o, _) = optim.lr_scheduler, optimizers(torch)
    for call, message in (
        (lambda: S.StepLR(Parameter(np.ones(2)), 3), "optimizer: expected one with param_groups, got Parameter"),
        (lambda: S.OneCycleLR(o, 0.1), "OneCycleLR: expected total_steps, or epochs and steps_per_epoch"),
        (lambda: S.OneCycleLR(o, 0.1, 5), "cycle_momentum: expected an optimizer with a momentum above 0"),
        (lambda: S.LambdaLR(o, [abs]), "lr_lambda: expected a function, or 2 of them, got 1"),
        (lambda: S.SequentialLR(o, [S.StepLR(o, 3)], [2]), "SequentialLR: expected schedulers of its optimizer"),
        (lambda: S.ReduceLROnPlateau(o, "least"), "ReduceLROnPlateau: expected mode 'min' or 'max'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
