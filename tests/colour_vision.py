"""How far apart colours look to readers with each kind of colour vision."""

from __future__ import annotations

import numpy as np

#: What protanopes, deuteranopes and tritanopes see of linear RGB: G. Machado, M. Oliveira, L. Fernandes, A
#: Physiologically-based Model for Simulation of Color Vision Deficiency, 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])
#: So far apart in CIELAB two colours can't be mistaken for each other: a just noticeable difference is 2.3.
APART = 15.0


def distance(first: tuple[int, int, int], second: tuple[int, int, int]) -> float:
    """Return how far apart two colours (0 to 255) look in CIELAB, in the worst of all kinds of vision."""
    return min(float(np.linalg.norm(_lab(m, first) - _lab(m, second))) for m in VISION.values())


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the channels of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _lab(vision: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    channels = np.array(colour) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    f = _XYZ @ np.clip(vision @ linear, 0, 1) / _WHITE
    f = np.where(f > 216 / 24389, np.cbrt(f), (24389 / 27 * f + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
