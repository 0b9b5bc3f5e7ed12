"""PyTorch's initial values, bit for bit: its generator, its uniform floats, its bounds for a layer's weights.

The generator is MT19937 seeded with init_genrand (Matsumoto and Nishimura, 1998); a float32 is the low 24 bits of one
draw, divided by 2**24.
"""

from __future__ import annotations

import math

import numpy as np

from clcomm.errors import ArgumentError

Shape = tuple[int, ...]


class Generator:
    """A source of random numbers that draws what PyTorch's CPU generator draws after `torch.manual_seed(seed)`."""

    def __init__(self, seed: int = 0):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Restart from `seed`, a whole number of which the low 32 bits count; ArgumentError for anything else."""
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise ArgumentError(f"seed: expected a whole number, got {seed!r}")
        self._engine = np.random.RandomState(int(seed) & 0xFFFFFFFF)

    def uniform(self, shape: Shape, low: float, high: float) -> np.ndarray:
        """Return float32 values, uniform on [low, high): those of `torch.empty(shape).uniform_(low, high)`."""
        draws = self._engine.randint(0, 1 << 32, size=math.prod(shape), dtype=np.uint32)
        unit = (draws & np.uint32((1 << 24) - 1)) * 2.0**-24
        low32, width32 = np.float32(low), np.float32(high) - np.float32(low)
        # PyTorch's unit * width + low is one fused float32 operation: rounded once, as the sum in float64 is here.
        return (unit * np.float64(width32) + np.float64(low32)).astype(np.float32).reshape(shape)


_generator = Generator()


def manual_seed(seed: int) -> None:
    """Seed the generator that layers without `rng=` take their initial values from."""
    _generator.manual_seed(seed)


def layer_values(weight_shape: Shape, bias: bool, rng: Generator | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the initial weight and bias of a Linear or Conv2d layer, drawn in this order.

    The weight is kaiming_uniform with a = sqrt(5) (He et al., 2015), the bias uniform within 1 / sqrt(fan_in).

    Args:
        weight_shape: [out, in] or [out, in, height, width].
        bias: whether the layer has a bias.
        rng: the source; None: the one that `manual_seed` seeds.
    """
    rng = _generator if rng is None else rng
    fan_in = math.prod(weight_shape[1:])
    gain = math.sqrt(2.0 / (1.0 + 5.0))
    bound = math.sqrt(3.0) * gain / math.sqrt(fan_in)
    weight = rng.uniform(weight_shape, -bound, bound)
    if not bias:
        return weight, None
    bias_bound = 1.0 / math.sqrt(fan_in)
    return weight, rng.uniform(weight_shape[:1], -bias_bound, bias_bound)
