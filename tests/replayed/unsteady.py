"""Nets that change from step to step, and one that depends on a value that no name leads to."""

from __future__ import annotations

import itertools
import os
import random
from random import choice

import numpy as np

from tests.replayed.around import LearningRateInTheStep
from tests.replayed.net import RATES, Net

VARIABLE = "CLCOMM_TEST_RATE"


class LearningRateSetInTheStep(LearningRateInTheStep):
    def function(self):
        step = super().function()

        def scheduled(x, y):
            self.optimizer.lr *= 0.9
            return step(x, y)

        return scheduled


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


class SystemRandom(Net):
    rng = random.SystemRandom()

    def between(self, h):
        return h * 0.5 if self.rng.random() < 0.0 else h


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
    """A value that no name leads to: its change is found when the function is compared with its recording."""

    def between(self, h):
        return h * RATES[int(os.environ.get(VARIABLE, "0"))]

    def change(self, value):
        os.environ[VARIABLE] = str(value)


#: Nets that can never be replayed: each step is another one, or may be.
NETS = (
    LearningRateSetInTheStep, StepsRead, Counter, OwnList, RandomBranch, RandomChoice, SystemRandom, NumpyRandom,
    OwnGenerator, Iterator, DataDependent,
)  # fmt: skip
