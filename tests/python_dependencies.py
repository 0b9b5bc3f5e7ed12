"""Models whose kernels are chosen by Python values, one kind of value each: what a replayed step must not lose."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import os
import random
import types
from random import choice
from typing import Any

import numpy as np

from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Generator, Linear, Module, Tensor, no_grad

FEATURES, HIDDEN, CLASSES = 6, 10, 3
RATES = (1.0, 0.5, 2.0)
RATE = 1.0
settings = types.SimpleNamespace(rate=1.0)
module_of_settings = types.ModuleType("settings_of_tests")
module_of_settings.rate = 1.0  # type: ignore[attr-defined]
VARIABLE = "CLCOMM_TEST_RATE"


class Net(Module):
    """Two layers; between them a subclass does what depends on a Python value, which `change` sets."""

    def __init__(self, device):
        rng = Generator(0)
        self.first = Linear(FEATURES, HIDDEN, device=device, rng=rng)
        self.last = Linear(HIDDEN, CLASSES, device=device, rng=rng)
        self.start()
        self.flat_space()
        self.optimizer = optim.SGD(self, 0.1, momentum=0.5, weight_decay=0.01)

    def start(self) -> None:
        pass

    def forward(self, x):
        return self.last(self.between(self.first(x).relu()))

    def between(self, h):
        return h

    def change(self, value: int) -> None:
        """Set what the step depends on to one of three values."""

    def function(self):
        """Return what is replayed."""
        loss_fn = CrossEntropyLoss()

        def forward_backward(x, y):
            loss = loss_fn(self(x), y)
            loss.backward()
            return loss

        return forward_backward

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Shapes(Net):
    pass


class Mode(Net):
    def between(self, h):
        return h * 2.0 if self.training else h

    def change(self, value):
        self.train(value != 1)


class ModeOfALayer(Net):
    def between(self, h):
        return h * 2.0 if self.first.training else h

    def change(self, value):
        self.first.train(value != 1)


class DropoutLike(Net):
    def start(self):
        self.p = 0.5

    def between(self, h):
        return h * (1.0 / (1.0 - self.p)) if self.training and self.p else h

    def change(self, value):
        self.p = (0.5, 0.1, 0.0)[value]


class Attribute(Net):
    def start(self):
        self.rate = 1.0

    def between(self, h):
        return h * self.rate

    def change(self, value):
        self.rate = RATES[value]


class AttributeByName(Attribute):
    def between(self, h):
        return h * getattr(self, "ra" + "te")


class NewAttribute(Net):
    def between(self, h):
        return h * getattr(self, "extra", 1.0)

    def change(self, value):
        self.extra = RATES[value]


class NestedAttribute(Net):
    def start(self):
        self.options = types.SimpleNamespace(inner=types.SimpleNamespace(rate=1.0))

    def between(self, h):
        return h * self.options.inner.rate

    def change(self, value):
        self.options.inner.rate = RATES[value]


class NestedModule(Net):
    def start(self):
        self.inner = Rated()

    def between(self, h):
        return self.inner(h)

    def change(self, value):
        self.inner.rate = RATES[value]


class Rated(Module):
    rate = 1.0

    def forward(self, x):
        return x * self.rate


class ClassAttribute(Net):
    def start(self):
        self.kind = type("Kind", (), {"rate": 1.0})

    def between(self, h):
        return h * self.kind.rate

    def change(self, value):
        self.kind.rate = RATES[value]


class ShadowedClassAttribute(NestedAttribute):
    def start(self):
        self.options = type("Kind", (), {"inner": types.SimpleNamespace(rate=1.0), "__module__": __name__})()

    def change(self, value):
        self.options.inner = types.SimpleNamespace(rate=RATES[value])


class Slots(Net):
    class Options:
        __slots__ = ("_rate",)

        @property
        def rate(self):
            return self._rate

    def start(self):
        self.options = Slots.Options()
        self.options._rate = 1.0

    def between(self, h):
        return h * self.options.rate

    def change(self, value):
        self.options._rate = RATES[value]


@dataclasses.dataclass
class Config:
    rate: float = 1.0


class EqualObject(Net):
    """An object gives way to an equal one, which is changed later."""

    def start(self):
        self.config = Config()

    def between(self, h):
        return h * self.config.rate

    def change(self, value):
        if value:
            self.config.rate = RATES[value]
        else:
            self.config = dataclasses.replace(self.config)


class EnumValue(Net):
    Kind = enum.Enum("Kind", "plain halved doubled")

    def start(self):
        self.kind = self.Kind.plain

    def between(self, h):
        return h if self.kind is self.Kind.plain else h * (0.5 if self.kind is self.Kind.halved else 2.0)

    def change(self, value):
        self.kind = list(self.Kind)[value]


class ListLength(Net):
    def start(self):
        self.rates = [2.0]

    def between(self, h):
        for rate in self.rates:
            h = h * rate
        return h

    def change(self, value):
        del self.rates[1:]
        self.rates += [0.5] * value


class ListElement(ListLength):
    def change(self, value):
        self.rates[0] = RATES[value]


class LoopCount(Net):
    def start(self):
        self.count = 1

    def between(self, h):
        for _ in range(self.count):
            h = (h * 0.9).relu()
        return h

    def change(self, value):
        self.count = value


class DictValues(Net):
    def start(self):
        self.table = {"a": 2.0, "b": 0.25}

    def between(self, h):
        for number, rate in enumerate(self.table.values()):
            h = h * rate + float(number)
        return h

    def change(self, value):
        self.table["a"] = RATES[value]


class DictOrder(DictValues):
    def change(self, value):
        if value:
            self.table["a"] = self.table.pop("a")
        else:
            self.table["b"] = self.table.pop("b")


class SmallArray(Net):
    def start(self):
        self.rates = np.ones(4)

    def between(self, h):
        return h * float(self.rates[2])

    def change(self, value):
        self.rates[2] = RATES[value]


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
        self.optimizer._hyper["weight_decay"] = 0.01 * RATES[value]


class LearningRateSetInTheStep(LearningRateInTheStep):
    def function(self):
        step = super().function()

        def scheduled(x, y):
            self.optimizer.lr *= 0.9
            return step(x, y)

        return scheduled


class LearningRateRead(Net):
    def between(self, h):
        return h * (10 * self.optimizer.lr)

    def change(self, value):
        self.optimizer.lr = 0.1 * RATES[value]


class StepsRead(Net):
    def between(self, h):
        return h * (1.0 / (1 + self.optimizer.steps))


class Counter(Net):
    def start(self):
        self.calls = 0

    def between(self, h):
        self.calls += 1
        return h * 0.5 if self.calls % 4 == 0 else h


class OwnList(Net):
    def start(self):
        self.log = []

    def between(self, h):
        self.log.append(len(self.log))
        return h * 0.5 if len(self.log) % 3 else h


class RandomBranch(Net):
    def between(self, h):
        return h * 0.5 if random.random() < 0.5 else h


class RandomChoice(Net):
    def between(self, h):
        return h * choice(RATES)


class NumpyRandom(Net):
    def between(self, h):
        return h * 0.5 if np.random.rand() < 0.5 else h


class OwnGenerator(Net):
    def start(self):
        self.rng = np.random.default_rng(3)

    def between(self, h):
        return h * float(self.rng.uniform())


class Iterator(Net):
    def start(self):
        self.rates = itertools.cycle(RATES)

    def between(self, h):
        return h * next(self.rates)


class DataDependent(Net):
    def between(self, h):
        return h * 0.5 if h.sum().item() > 12 else h


class Environment(Net):
    """What no name leads to: another value is found when the function is compared with its recording."""

    def between(self, h):
        return h * RATES[int(os.environ.get(VARIABLE, "0"))]

    def change(self, value):
        os.environ[VARIABLE] = str(value)


#: What never lets a step be replayed: it is another one, or may be, each time.
UNSTEADY = (
    LearningRateSetInTheStep, StepsRead, Counter, OwnList, RandomBranch, RandomChoice, NumpyRandom, OwnGenerator,
    Iterator, DataDependent,
)  # fmt: skip
#: What a replay cannot see, so that it may only raise later on.
HIDDEN_FROM_REPLAYS = (Environment,)
#: What is known to be the same before each replay.
STEADY = (
    Shapes, Mode, ModeOfALayer, DropoutLike, Attribute, AttributeByName, NewAttribute, NestedAttribute, NestedModule,
    ClassAttribute, ShadowedClassAttribute, Slots, EqualObject, EnumValue, ListLength, ListElement, LoopCount,
    DictValues, DictOrder, SmallArray, Global, GlobalObject, PythonModule, Helper, ClosureCell, Default, Partial,
    CallableObject, OtherMethod, TensorAround, Frozen, Recording, LearningRateInTheStep, WeightDecayInTheStep,
    LearningRateRead,
)  # fmt: skip


def batch(device, rng: Any, size: int = 4):
    x = rng.standard_normal((size, FEATURES)).astype(np.float32)
    return Tensor(x, device), Tensor(rng.integers(0, CLASSES, size).astype(np.int32), device)


class Randomness:
    """The state of the global random generators, so that two runs draw the same."""

    def __init__(self) -> None:
        self.states = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])
