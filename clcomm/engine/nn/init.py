"""PyTorch's initial values, bit for bit: its generator, its uniform floats, its bounds for a layer's weights.

The generator is MT19937 seeded with init_genrand (Matsumoto and Nishimura, 1998); a float32 is the low 24 bits of one
draw, divided by 2**24.
"""

from __future__ import annotations

import math

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.ops.types import typed
from clcomm.engine.parameter import Parameter
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Tensor, float_tensor

__all__ = [
    "calculate_gain", "constant_", "dirac_", "eye_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_",
    "orthogonal_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_", "zeros_",
]  # fmt: skip

Shape = tuple[int, ...]


class Generator:
    """A source of random numbers with the sequence of PyTorch's CPU generator after `torch.manual_seed(seed)`."""

    #: The seed of PyTorch's generators before `manual_seed`.
    UNSEEDED = 67280421310721

    def __init__(self, seed: int = UNSEEDED):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> Generator:
        """Restart from `seed`, a whole number of which the low 32 bits count; return the generator itself.

        Raises ArgumentError for anything else.
        """
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise ArgumentError(f"seed: expected a whole number, got {seed!r}")
        self._engine = np.random.RandomState(int(seed) & 0xFFFFFFFF)
        self._spare: list[float] = []  # the second of a pair of normal values of which one was asked for
        return self

    def uniform(self, shape: Shape, low: float, high: float) -> np.ndarray:
        """Return float32 values, uniform on [low, high): those of `torch.empty(shape).uniform_(low, high)`."""
        draws = self._engine.randint(0, 1 << 32, size=math.prod(shape), dtype=np.uint32)
        unit = (draws & np.uint32((1 << 24) - 1)) * 2.0**-24
        low32, width32 = np.float32(low), np.float32(high) - np.float32(low)
        # PyTorch's unit * width + low is one fused float32 operation: rounded once, as the sum in float64 is here.
        return (unit * np.float64(width32) + np.float64(low32)).astype(np.float32).reshape(shape)

    def normal(self, shape: Shape) -> np.ndarray:
        """Return float32 values from N(0, 1): those of `torch.empty(shape).normal_()` but for rounding, about 1e-6.

        Uniform values become normal ones by Box and Muller's transform, 16 at a time; fewer than 16 in all are pairs of
        draws of 53 bits. Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
        """
        count = math.prod(shape)
        if count < _NORMAL_BLOCK:
            return self._normal_pairs(count).astype(np.float32).reshape(shape)
        values = self.uniform((count,), 0.0, 1.0)
        whole = count - count % _NORMAL_BLOCK
        result = np.empty(count, np.float32)
        result[:whole] = _box_muller(values[:whole])
        if whole < count:  # the last 16, of which some are done, are drawn anew
            result[-_NORMAL_BLOCK:] = _box_muller(self.uniform((_NORMAL_BLOCK,), 0.0, 1.0))
        return result.reshape(shape)

    def integers(self, shape: Shape, low: int, high: int) -> np.ndarray:
        """Return int64 values from low below high, less than 2**32 apart: those of `torch.randint`."""
        draws = self._engine.randint(0, 1 << 32, size=math.prod(shape), dtype=np.uint32)
        return (low + draws.astype(np.int64) % (high - low)).reshape(shape)

    def permutation(self, count: int) -> np.ndarray:
        """Return the numbers below `count` in a random order, that of `torch.randperm`."""
        order = np.arange(count)
        draws = self._engine.randint(0, 1 << 32, size=max(count - 1, 0), dtype=np.uint32).astype(np.int64)
        for place, other in enumerate((np.arange(count - 1) + draws % np.arange(count, 1, -1)).tolist()):
            order[place], order[other] = order[other], order[place]
        return order

    def next_seed(self) -> int:
        """Return a number of 63 bits for another generator: that of `torch.empty((), dtype=torch.int64).random_()`."""
        high, low = map(int, self._engine.randint(0, 1 << 32, size=2, dtype=np.uint32))
        return (high << 32 | low) & (1 << 63) - 1

    def _normal_pairs(self, count: int) -> np.ndarray:
        spare, self._spare = self._spare[:count], self._spare[count:]
        pairs = (count - len(spare) + 1) // 2
        draws = self._engine.randint(0, 1 << 32, size=4 * pairs, dtype=np.uint32).astype(np.uint64).reshape(-1, 2)
        unit = (draws[:, 0] << np.uint64(32) | draws[:, 1]) & np.uint64((1 << 53) - 1)
        first, second = (unit * 2.0**-53).reshape(pairs, 2).T
        radius, angle = np.sqrt(-2 * np.log1p(-second)), 2 * np.pi * first
        values = [*spare, *np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)]
        self._spare += values[count:]
        return np.array(values[:count])


_NORMAL_BLOCK = 16


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    """Return normal values of uniform ones in [0, 1), in blocks of 16: 8 radii and 8 angles each."""
    radii, angles = uniform.reshape(-1, 2, _NORMAL_BLOCK // 2).astype(np.float64).transpose(1, 0, 2)
    radius, angle = np.sqrt(-2 * np.log1p(-radii)), 2 * np.pi * angles
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)


_generator = Generator(0)


def default_generator() -> Generator:
    """Return the generator that `manual_seed` seeds."""
    return _generator


def manual_seed(seed: int) -> Generator:
    """Seed the generator that layers without `rng=` take their initial values from, and dropout; return the former."""
    _generator.manual_seed(seed)
    RandomStream.seed_all(int(seed))
    return _generator


def normal_values(shape: Shape, rng: Generator | None) -> np.ndarray:
    """Return the initial values of an embedding; `rng` None: the generator that `manual_seed` seeds."""
    return (_generator if rng is None else rng).normal(shape)


def uniform_values(shape: Shape, bound: float, rng: Generator | None) -> np.ndarray:
    """Return initial values within `bound` of 0; `rng` None: the generator that `manual_seed` seeds."""
    return (_generator if rng is None else rng).uniform(shape, -bound, bound)


def layer_parameters(
    weight_shape: Shape, bias: bool, device: Device | str | None, rng: Generator | None, outputs: int | None = None
) -> tuple[Parameter, Parameter | None]:
    """Return the weight and bias, or None, of `layer_values` on a device; None: `default_device()`."""
    weight_values, bias_values = layer_values(weight_shape, bias, rng, outputs)
    weight = Parameter(weight_values, device)
    return weight, None if bias_values is None else Parameter(bias_values, weight.device)


def layer_values(
    weight_shape: Shape, bias: bool, rng: Generator | None, outputs: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the initial weight and bias of a Linear or Conv2d layer, drawn in this order.

    The weight is kaiming_uniform with a = sqrt(5) (He et al., 2015), the bias uniform within 1 / sqrt(fan_in).

    Args:
        weight_shape: [out, in] or [out, in, height, width].
        bias: whether the layer has a bias.
        rng: the source; None: the one that `manual_seed` seeds.
        outputs: the size of the bias; None: weight_shape[0].
    """
    rng = _generator if rng is None else rng
    fan_in = math.prod(weight_shape[1:])
    gain = math.sqrt(2.0 / (1.0 + 5.0))
    bound = math.sqrt(3.0) * gain / math.sqrt(fan_in)
    weight = rng.uniform(weight_shape, -bound, bound)
    if not bias:
        return weight, None
    bias_bound = 1.0 / math.sqrt(fan_in)
    return weight, rng.uniform(weight_shape[:1] if outputs is None else (outputs,), -bias_bound, bias_bound)


_PLAIN = ("linear", "conv1d", "conv2d", "conv3d", "sigmoid")
_GAINS = {**dict.fromkeys(_PLAIN, 1.0), "tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 0.75}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor of the standard deviation for weights before a nonlinearity, as PyTorch's function."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1.0 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in _GAINS:
        raise ArgumentError(f"nonlinearity: expected one of {', '.join((*_GAINS, 'leaky_relu'))}, got {nonlinearity!r}")
    return _GAINS[nonlinearity]


def _fans(tensor: Tensor) -> tuple[int, int]:
    if tensor.ndim < 2:
        raise ArgumentError(f"init: expected a tensor of at least 2 dimensions, got shape {tensor.shape}")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def _filled(tensor: Tensor, values: np.ndarray) -> Tensor:
    tensor.copy_from(values)
    return tensor


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with uniform values of [a, b); return it."""
    shape = float_tensor("uniform_", tensor).shape
    return _filled(tensor, (_generator if generator is None else generator).uniform(shape, a, b))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with values of N(mean, std^2); return it."""
    values = normal_values(float_tensor("normal_", tensor).shape, generator)
    return _filled(tensor, values * np.float32(std) + np.float32(mean))


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill a tensor with values of N(mean, std^2) within [a, b], by drawing others anew; return it.

    PyTorch's numbers from version 2.13 on, where the limits hold 30% or more of all. Raises ArgumentError where no
    value lies between them.
    """
    if not a < b or not std > 0 or not a - 5 * std < mean < b + 5 * std:
        raise ArgumentError(f"trunc_normal_: expected a < b within 5 std of the mean, got {(mean, std, a, b)}")
    source = _generator if generator is None else generator

    def drawn() -> np.ndarray:
        return source.normal(tensor.shape) * np.float32(std) + np.float32(mean)

    values = drawn()
    while (outside := (values < np.float32(a)) | (values > np.float32(b))).any():
        values = np.where(outside, drawn(), values)
    return _filled(tensor, values)


def eye_(tensor: Tensor) -> Tensor:
    """Fill a matrix with ones on its diagonal, and zeros; return it."""
    return _filled(tensor, np.eye(*tensor.shape, dtype=np.float32))


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Fill a convolution's weight, [O, C / groups, ...], so that it passes channels on as they are; return it.

    Raises ArgumentError for other than 3 to 5 dimensions, and for outputs that the groups do not divide.
    """
    if not 3 <= tensor.ndim <= 5 or tensor.shape[0] % groups:
        raise ArgumentError(f"dirac_: expected 3 to 5 dimensions and O that {groups} divides, got shape {tensor.shape}")
    values, each = np.zeros(tensor.shape, np.float32), tensor.shape[0] // groups
    centre = tuple([n // 2 for n in tensor.shape[2:]])
    for group in range(groups):
        for channel in range(min(each, tensor.shape[1])):
            values[(group * each + channel, channel, *centre)] = 1.0
    return _filled(tensor, values)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill a tensor with a number; return it."""
    return _filled(tensor, np.full(tensor.shape, val, np.float32))


def ones_(tensor: Tensor) -> Tensor:
    """Fill a tensor with 1; return it."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill a tensor with 0; return it."""
    return constant_(tensor, 0.0)


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with uniform values for layers of its size; return it. Source: Glorot and Bengio, 2010."""
    bound = math.sqrt(3.0) * gain * math.sqrt(2.0 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with normal values for layers of its size; return it. Source: Glorot and Bengio, 2010."""
    return normal_(tensor, 0.0, gain * math.sqrt(2.0 / sum(_fans(tensor))), generator)


def orthogonal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Write `gain` times a matrix of orthonormal rows or columns, the first dimension being its rows.

    Source: Saxe et al., "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks", 2014.
    Raises ArgumentError for fewer than two dimensions.
    """
    if tensor.ndim < 2:
        raise ArgumentError(f"orthogonal_: expected two or more dimensions, got shape {tensor.shape}")
    drawn = normal_values((tensor.shape[0], math.prod(tensor.shape[1:])), generator).astype(np.float64)
    is_wide = drawn.shape[0] < drawn.shape[1]
    matrix, triangle = np.linalg.qr(drawn.T if is_wide else drawn)
    matrix = matrix * np.sign(np.diag(triangle))
    return _filled(tensor, (gain * (matrix.T if is_wide else matrix)).reshape(tensor.shape))


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill a tensor with uniform values for layers before a rectifier; return it. Source: He et al., 2015."""
    bound = math.sqrt(3.0) * _kaiming(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """Fill a tensor with normal values for layers before a rectifier; return it. Source: He et al., 2015."""
    return normal_(tensor, 0.0, _kaiming(tensor, a, mode, nonlinearity), generator)


def _kaiming(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ArgumentError(f"mode: expected 'fan_in' or 'fan_out', got {mode!r}")
    return calculate_gain(nonlinearity, a) / math.sqrt(_fans(tensor)[mode == "fan_out"])


def _random_(tensor: Tensor, low: int = 0, high: int | None = None, *, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with whole numbers from `low` below `high`, of one number below it, of none up to 2^24."""
    limits = (low, high) if high is not None else (0, low or 2**24 + 1)
    return _filled(tensor, (_generator if generator is None else generator).integers(tensor.shape, *limits))


def _bernoulli_(tensor: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """Fill a tensor with 1 with probability p, else 0, not PyTorch's; return it."""
    return _filled(tensor, (_generator if generator is None else generator).uniform(tensor.shape, 0.0, 1.0) < p)


#: The methods with which PyTorch's older programs draw weights.
for _name, _own in (("normal_", normal_), ("uniform_", uniform_), ("random_", _random_), ("bernoulli_", _bernoulli_)):
    setattr(Tensor, _name, typed(_own, _name))
