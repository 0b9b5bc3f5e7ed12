"""Nets that depend on values outside them: globals, enclosing variables, functions, tensors, the optimizer."""

from __future__ import annotations

import functools
import types

import numpy as np

from clcomm.engine import Tensor, no_grad
from tests.replayed.net import HIDDEN, RATES, Net

RATE = 1.0
settings = types.SimpleNamespace(rate=1.0)
module_of_settings = types.ModuleType("settings_of_tests")
module_of_settings.rate = 1.0  # type: ignore[attr-defined]


class Shapes(Net):
    pass


class Global(Net):
    def between(self, h):
        return h * RATE

    def change(self, value):
        global RATE
        RATE = RATES[value]


class GlobalObject(Net):
    def between(self, h):
        return h * settings.rate

    def change(self, value):
        settings.rate = RATES[value]


class PythonModule(Net):
    def between(self, h):
        return h * module_of_settings.rate

    def change(self, value):
        module_of_settings.rate = RATES[value]


def rate_of(options):
    return options.rate


class Helper(Net):
    """A function that is called reads an attribute of what it is given."""

    def start(self):
        self.options = types.SimpleNamespace(rate=1.0)

    def between(self, h):
        return h * rate_of(self.options)

    def change(self, value):
        self.options.rate = RATES[value]


class ClosureCell(Net):
    def start(self):
        rate = 1.0

        def between(h):
            return h * rate

        def change(value):
            nonlocal rate
            rate = RATES[value]

        self.between, self.change = between, change


class Default(Net):
    def between(self, h, rates=(1.0,), table={"rate": 1.0}):  # noqa: B006
        return h * table["rate"] * rates[0]

    def change(self, value):
        type(self).between.__defaults__[1]["rate"] = RATES[value]


class Partial(Net):
    def start(self):
        self.options = {"rate": 1.0}
        self.between = functools.partial(self.scaled, self.options)

    @staticmethod
    def scaled(options, h):
        return h * options["rate"]

    def change(self, value):
        self.options["rate"] = RATES[value]


class FunctionAttribute(Net):
    def start(self):
        def between(h):
            return h * between.rate

        between.rate = 1.0
        self.between = between

    def change(self, value):
        self.between.rate = RATES[value]


class CallableObject(Net):
    class Scale:
        rate = 1.0

        def __call__(self, h):
            return h * self.rate

    def start(self):
        self.between = CallableObject.Scale()

    def change(self, value):
        self.between.rate = RATES[value]


class OtherMethod(Net):
    def change(self, value):
        self.between = lambda h: h * RATES[value]


class TensorAround(Net):
    def start(self):
        self.mask = Tensor(np.ones(HIDDEN), self.first.weight.device)

    def between(self, h):
        return h * self.mask

    def change(self, value):
        self.mask = Tensor(np.full(HIDDEN, RATES[value]), self.first.weight.device)


class Frozen(Net):
    def update(self) -> None:
        pass  # an optimizer may have its own view of what is frozen

    def change(self, value):
        self.first.bias.requires_grad = value != 1


class Recording(Net):
    """Part of the model is under no_grad at times."""

    def start(self):
        self.is_fixed = False

    def between(self, h):
        if self.is_fixed:
            with no_grad():
                return h * 1.0
        return h * 1.0

    def change(self, value):
        self.is_fixed = value == 1


class LearningRateInTheStep(Net):
    """The whole step is replayed; the learning rate is set around it."""

    def function(self):
        forward_backward = super().function()

        def step(x, y):
            loss = forward_backward(x, y)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        return step

    def update(self):
        pass

    def change(self, value):
        self.optimizer.lr = 0.1 * RATES[value]


class WeightDecayInTheStep(LearningRateInTheStep):
    def change(self, value):
        self.optimizer.param_groups[0]["weight_decay"] = 0.01 * RATES[value]


class LearningRateRead(Net):
    def between(self, h):
        return h * (10 * self.optimizer.lr)

    def change(self, value):
        self.optimizer.lr = 0.1 * RATES[value]


#: Nets whose value is known to be the same before each replay.
NETS = (
    Shapes, Global, GlobalObject, PythonModule, Helper, ClosureCell, Default, Partial, FunctionAttribute,
    CallableObject, OtherMethod, TensorAround, Frozen, Recording, LearningRateInTheStep, WeightDecayInTheStep,
    LearningRateRead,
)  # fmt: skip
