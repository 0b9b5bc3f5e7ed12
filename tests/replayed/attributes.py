"""Nets that depend on attributes: of themselves, of modules and objects in them, and of containers."""

from __future__ import annotations

import dataclasses
import enum
import types

import numpy as np

from clcomm.engine import Module
from tests.replayed.net import RATES, Net


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
    """An object is replaced by an equal one, which is changed later."""

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
        for rate in self.table.values():
            h = h * rate + 0.5
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


#: Nets whose value is known to be the same before each replay.
NETS = (
    Mode, ModeOfALayer, DropoutLike, Attribute, AttributeByName, NewAttribute, NestedAttribute, NestedModule,
    ClassAttribute, ShadowedClassAttribute, Slots, EqualObject, EnumValue, ListLength, ListElement, LoopCount,
    DictValues, DictOrder, SmallArray,
)  # fmt: skip
