"""New tensors by their shape, with PyTorch's names and, where they are drawn, PyTorch's numbers.

All take `dtype`, float32, int32, for which PyTorch's int64 stands too, or bool; `device`; and `requires_grad`. Random
values are drawn on the host, by the generator that `manual_seed` seeds: a step that draws them is not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, default_generator
from clcomm.engine.ops.types import shown, typed
from clcomm.engine.tensor import BOOL, FLOAT32, INT32, Tensor

Place = Device | str | None

__all__ = [
    "arange", "as_tensor", "bernoulli", "empty", "empty_like", "eye", "from_numpy", "full", "full_like", "linspace",
    "logspace", "multinomial", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
]  # fmt: skip


def tensor(values: object, dtype: Any = None, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return values as a tensor; a copy. Raises ArgumentError for integers outside int32, and for other types.

    Without `dtype` that is so of integers of other sizes than int32's and int64's, which would wrap around in PyTorch.
    """
    array = np.asarray(_on_host(values))
    if array.dtype.kind not in "fiub":
        raise ArgumentError(f"tensor: expected numbers, got {type(values).__name__} of {array.dtype}")
    if dtype is None and array.dtype.kind in "iu" and array.dtype not in (INT32, np.int64):
        raise ArgumentError(
            f"tensor: expected float32, int32, int64 or bool, got {array.dtype}, which would not wrap around here; use "
            "astype(np.int64), or dtype="
        )
    if dtype is not None:
        kind = _type(dtype)
        with np.errstate(invalid="ignore"):  # a number too large for int64 is none for int32 either: Tensor refuses it
            array = array.astype(np.int64 if kind == INT32 else kind)
    return Tensor(array, device, requires_grad)


def as_tensor(values: object, dtype: Any = None, device: Place = None) -> Tensor:
    """Return a tensor itself, other values as a new one."""
    if isinstance(values, Tensor):
        return values if dtype is None and device is None else values.to(dtype and _type(dtype), device)
    if isinstance(values, np.ndarray) and dtype is None and device is None:
        return from_numpy(values)
    return tensor(values, dtype, device)


def from_numpy(array: np.ndarray) -> Tensor:
    """Return an array's values as a tensor; what is written to the tensor is written to the array, not the reverse."""
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"from_numpy: expected an array, got {type(array).__name__}")
    result = tensor(array)
    result.buffer.array_of_values = array
    return result


def full(
    size: Sequence[int],
    fill_value: bool | float,
    *,
    dtype: Any = None,
    device: Place = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of one value, of whose type it is without `dtype`."""
    if dtype is None:
        dtype = {"b": BOOL, "i": INT32, "u": INT32}.get(np.asarray(fill_value).dtype.kind, FLOAT32)
    return tensor(np.full(_shape(size), fill_value), dtype, device, requires_grad)


def zeros(*size: Any, dtype: Any = FLOAT32, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return zeros."""
    return full(_sizes(size), 0, dtype=dtype, device=device, requires_grad=requires_grad)


def ones(*size: Any, dtype: Any = FLOAT32, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return ones."""
    return full(_sizes(size), 1, dtype=dtype, device=device, requires_grad=requires_grad)


#: Memory without values is zeros here: the same in every run.
empty = zeros


def eye(n: int, m: int | None = None, *, dtype: Any = FLOAT32, device: Place = None) -> Tensor:
    """Return a matrix of ones on its diagonal, and zeros."""
    return tensor(np.eye(n, m), dtype, device)


def arange(*limits: float, dtype: Any = None, device: Place = None) -> Tensor:
    """Return numbers from 0 or the first limit, below the second, in steps of 1 or the third."""
    values = np.arange(*limits)
    return tensor(values, (FLOAT32 if values.dtype.kind == "f" else INT32) if dtype is None else dtype, device)


def tril_indices(row: int, col: int, offset: int = 0, *, device: Place = None) -> Tensor:
    """Return the rows and the columns of a matrix's elements up to a diagonal, [2, number]."""
    return tensor(np.stack(np.tril_indices(row, offset, col)), INT32, device)


def triu_indices(row: int, col: int, offset: int = 0, *, device: Place = None) -> Tensor:
    """Return the rows and the columns of a matrix's elements from a diagonal on, [2, number]."""
    return tensor(np.stack(np.triu_indices(row, offset, col)), INT32, device)


def linspace(start: float, end: float, steps: int, *, dtype: Any = FLOAT32, device: Place = None) -> Tensor:
    """Return numbers at equal distances, both ends included."""
    return tensor(np.linspace(start, end, steps), dtype, device)


def logspace(start: float, end: float, steps: int, base: float = 10.0, *, dtype: Any = FLOAT32,
             device: Place = None) -> Tensor:  # fmt: skip
    """Return powers of a base, of exponents at equal distances, both ends included."""
    return tensor(np.logspace(start, end, steps, base=base), dtype, device)


# -- drawn


def rand(*size: Any, generator: Generator | None = None, dtype: Any = FLOAT32, device: Place = None,
         requires_grad: bool = False) -> Tensor:  # fmt: skip
    """Return numbers from [0, 1)."""
    return tensor(_source(generator).uniform(_sizes(size), 0.0, 1.0), dtype, device, requires_grad)


def randn(*size: Any, generator: Generator | None = None, dtype: Any = FLOAT32, device: Place = None,
          requires_grad: bool = False) -> Tensor:  # fmt: skip
    """Return numbers from N(0, 1)."""
    return tensor(_source(generator).normal(_sizes(size)), dtype, device, requires_grad)


def normal(
    mean: Any, std: Any, size: Any = None, *, generator: Generator | None = None, device: Place = None
) -> Tensor:
    """Return numbers from N(mean, std**2); without `size` of the shape of the mean, or of the deviation."""
    if size is None:
        size = (mean if isinstance(mean, Tensor) else std).shape
    drawn: Tensor = randn(size, generator=generator, device=device) * std + mean
    return drawn


def randint(low: int, high: int | Sequence[int] | None = None, size: Sequence[int] | None = None, *,
            generator: Generator | None = None, dtype: Any = INT32, device: Place = None) -> Tensor:  # fmt: skip
    """Return integers from `low`, or 0 where `high` is left out, below `high`."""
    if isinstance(high, Sequence):
        high, size = None, high
    if high is None:
        low, high = 0, low
    if size is None or not -(2**31) <= low < high <= 2**31:
        raise ArgumentError(f"randint: expected low < high within int32 and a size, got {low}, {high} and {size}")
    return tensor(_source(generator).integers(_shape(size), low, high), dtype, device)


def randperm(n: int, *, generator: Generator | None = None, dtype: Any = INT32, device: Place = None) -> Tensor:
    """Return the integers from 0 below n in a random order."""
    return tensor(_source(generator).permutation(n), dtype, device)


def bernoulli(p: Tensor, *, generator: Generator | None = None) -> Tensor:
    """Return 1 with the probability that each element is, else 0; not PyTorch's numbers."""
    return (rand(p.shape, generator=generator, device=p.device) < p).float()


def multinomial(probabilities: Tensor, num_samples: int, replacement: bool = False,
                *, generator: Generator | None = None) -> Tensor:  # fmt: skip
    """Return the indices of drawn columns of each row, whose weights the row has; not PyTorch's numbers.

    probabilities: [n] or [rows, n], not negative, with a sum above 0. Read to the host.
    """
    weights = probabilities.numpy().astype(np.float64)
    sums = weights.sum(-1, keepdims=True)
    if weights.ndim not in (1, 2) or (weights < 0).any() or not np.isfinite(sums).all() or (sums <= 0).any():
        raise ArgumentError(f"multinomial: expected weights from 0 up with a sum above 0, got shape {weights.shape}")
    least = num_samples if not replacement else 1
    if num_samples < 1 or (weights > 0).sum(-1).min() < least:
        raise ArgumentError(f"multinomial: expected {num_samples} columns with a weight above 0 in each row")
    source = _source(generator)
    rows = (weights / sums).reshape(-1, weights.shape[-1])
    chosen = np.stack([_drawn(source, row, num_samples, replacement) for row in rows])
    return Tensor(chosen.reshape(*weights.shape[:-1], num_samples), probabilities.device)


def _drawn(source: Generator, weights: np.ndarray, count: int, replacement: bool) -> np.ndarray:
    if replacement:
        return np.searchsorted(weights.cumsum(), source.uniform((count,), 0.0, float(weights.sum())), side="right")
    # The largest of u^(1/w) are a sample without replacement (Efraimidis and Spirakis, 2006).
    with np.errstate(divide="ignore"):
        keys = np.log(source.uniform(weights.shape, 0.0, 1.0).astype(np.float64)) / weights
    return np.argsort(-np.where(weights > 0, keys, -np.inf), kind="stable")[:count]


# -- of another tensor's shape


def _like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(x: Tensor, *, dtype: Any = None, device: Place = None, requires_grad: bool = False) -> Tensor:
        own = x.dtype if dtype is None else dtype
        return make(x.shape, dtype=own, device=x.device if device is None else device, requires_grad=requires_grad)

    function.__name__ = f"{make.__name__}_like"
    function.__doc__ = f"Return `{make.__name__}` of another tensor's shape, type and device."
    return function


zeros_like, ones_like, rand_like, randn_like = map(_like, (zeros, ones, rand, randn))
empty_like = zeros_like


def full_like(x: Tensor, fill_value: bool | float, *, dtype: Any = None, device: Place = None) -> Tensor:
    """Return a tensor of one value, of another one's shape, type and device."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device or x.device)


def randint_like(x: Tensor, low: int, high: int | None = None, *, dtype: Any = None, device: Place = None) -> Tensor:
    """Return `randint` of another tensor's shape, type and device."""
    own = x.dtype if dtype is None else dtype
    limits = (0, low) if high is None else (low, high)
    return randint(limits[0], limits[1], x.shape, dtype=own, device=device or x.device)


def _on_host(values: Any) -> Any:
    """Return values with arrays in place of tensors in lists."""
    if isinstance(values, Tensor):
        return values.numpy()
    return [_on_host(each) for each in values] if isinstance(values, (list, tuple)) else values


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes that a caller gives one by one, or in a sequence."""
    return _shape(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size or (None,))


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    wrong = [n for n in size if isinstance(n, bool) or not isinstance(n, Integral) or n < 0]
    if wrong:
        raise ArgumentError(f"size: expected integers from 0 up, got {wrong[0]!r}")
    return tuple([int(n) for n in size])


def _source(generator: Generator | None) -> Generator:
    return default_generator() if generator is None else generator


def _type(dtype: Any) -> np.dtype:
    try:
        if isinstance(dtype, (Tensor, np.ndarray)):
            raise TypeError
        wanted: np.dtype = np.dtype({float: FLOAT32, int: INT32, bool: BOOL}.get(dtype, dtype))
    except TypeError:
        raise ArgumentError(f"dtype: expected float32, int32 or bool, got {shown(dtype)}") from None
    wanted = INT32 if wanted == np.int64 else wanted
    if wanted not in (FLOAT32, INT32, BOOL):
        raise ArgumentError(f"dtype: expected float32, int32 or bool, got {wanted}, which is not here")
    return wanted


for _name in __all__:
    globals()[_name] = typed(globals()[_name], _name)
