"""Stands for Gymnasium: a pole on a cart. Source: Barto, Sutton and Anderson, "Neuronlike adaptive elements", 1983."""

from __future__ import annotations

import math

import numpy as np

GRAVITY, CART, POLE, HALF, FORCE, STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


class CartPole:
    """States of position, speed, angle and its speed; the reward of each step that the pole stands is 1."""

    def reset(self, seed=None):
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._state = self._rng.uniform(-0.05, 0.05, 4)
        return self._state.astype(np.float32), {}

    def step(self, action):
        x, speed, angle, turn = self._state
        force = FORCE if action == 1 else -FORCE
        total = CART + POLE
        pushed = (force + POLE * HALF * turn**2 * math.sin(angle)) / total
        lever = HALF * (4 / 3 - POLE * math.cos(angle) ** 2 / total)
        faster = (GRAVITY * math.sin(angle) - math.cos(angle) * pushed) / lever
        pulled = pushed - POLE * HALF * faster * math.cos(angle) / total
        self._state = np.array([x + STEP_S * speed, speed + STEP_S * pulled, angle + STEP_S * turn,
                                turn + STEP_S * faster])  # fmt: skip
        fell = abs(self._state[0]) > 2.4 or abs(self._state[2]) > math.radians(12)
        return self._state.astype(np.float32), 1.0, bool(fell), False, {}

    class spec:
        reward_threshold = 475.0


def make(name, **options):
    environment = CartPole()
    environment.reset(seed=0)
    return environment
