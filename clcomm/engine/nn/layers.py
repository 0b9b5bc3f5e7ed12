"""Layers. N C H W: images, channels, height, width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.activations import Activation, FunctionLayer
from clcomm.engine.nn.init import Generator, layer_parameters, normal_values
from clcomm.engine.nn.module import Module
from clcomm.engine.ops.dropout import check_probability
from clcomm.engine.parameter import Parameter
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import FLOAT32, Tensor


def require_positive(**sizes: int) -> None:
    """Raise ArgumentError, with the name, for a size below 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}: expected a whole number of at least 1, got {value!r}")


class Linear(Module):
    """x [N, in_features] -> x weight^T + bias [N, out_features]; initial values are PyTorch's.

    Args:
        bias: whether the layer has a bias.
        device: where its parameters are; by default `default_device()`.
        dtype: float32 or None.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device | str | None = None,
        dtype: object = None,
        *,
        rng: Generator | None = None,
    ):
        require_positive(in_features=in_features, out_features=out_features)
        if dtype not in (None, FLOAT32):
            raise ArgumentError(f"dtype: expected float32, got {dtype!r}")
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = layer_parameters((out_features, in_features), bias, device, rng)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Unflatten(Module):
    """One dimension as several, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]):
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        at = self.dim % max(x.ndim, 1)
        return F.reshape(x, (*x.shape[:at], *self.unflattened_size, *x.shape[at + 1 :]))


class Embedding(Module):
    """Indices [...] -> rows of a table [..., embedding_dim]; initial values are drawn from N(0, 1), as PyTorch's.

    Args:
        num_embeddings: the rows of the table.
        embedding_dim: the values of a row.
        padding_idx: a row that begins as zeros and gets no gradient; a negative one counts from the end.
        device: where the table is; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        require_positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            last = num_embeddings - 1
            raise ArgumentError(f"padding_idx: expected from {-num_embeddings} to {last}, got {padding_idx!r}")
        values = normal_values((num_embeddings, embedding_dim), rng)
        if padding_idx is not None:
            values[padding_idx] = 0
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = Parameter(values, device)

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight, self.padding_idx)


class EmbeddingBag(Embedding):
    """Indices [N, length], or all bags' with their offsets, -> sum, mean or largest of entries [N, embedding_dim].

    Args:
        num_embeddings: the rows of the table.
        embedding_dim: the values of a row.
        mode: "mean", "sum" or "max".
        include_last_offset: the last of the offsets is the number of all indices.
        device: where the table is; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: Device | str | None = None,
        rng: Generator | None = None,
    ):
        if mode not in ("mean", "sum", "max"):
            raise ArgumentError(f"EmbeddingBag: mode: expected 'mean', 'sum' or 'max', got {mode!r}")
        self.mode, self.include_last_offset = mode, include_last_offset
        super().__init__(num_embeddings, embedding_dim, device=device, rng=rng)

    def forward(
        self, input: Tensor, offsets: Tensor | np.ndarray | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return each bag's sum, of the entries times `per_sample_weights`, as `input`, if given, mean or maximum.

        Args:
            input: indices [N, length]; or [length] of all bags, one after the other.
            offsets: where each of these begins, which is read to the host; one without indices has zeros.

        Raises ArgumentError for a matrix with offsets, or other indices without, and offsets that decrease.
        """
        if (offsets is None) != (input.ndim == 2) or input.ndim not in (1, 2):
            raise ArgumentError(
                f"EmbeddingBag: expected indices [N, length], or [length] with offsets, got shape {input.shape} and "
                f"{'none' if offsets is None else 'some'}"
            )
        if per_sample_weights is not None and self.mode != "sum":
            raise ArgumentError(f"EmbeddingBag: per_sample_weights: expected mode 'sum', got {self.mode!r}")
        entries = F.embedding(input, self.weight)
        if per_sample_weights is not None:
            entries = entries * F.unsqueeze(per_sample_weights, -1)
        if offsets is not None:
            return self._of_bags(entries, np.asarray(offsets.numpy() if isinstance(offsets, Tensor) else offsets))
        if self.mode == "max":
            largest, _ = F.max(entries, 1)
            return largest
        return F.sum(entries, 1) if self.mode == "sum" else F.mean(entries, 1)

    def _of_bags(self, entries: Tensor, offsets: np.ndarray) -> Tensor:
        count = entries.shape[0]
        ends = offsets[1:] if self.include_last_offset else np.append(offsets[1:], count)
        sizes = ends - offsets[: len(ends)]
        if not sizes.size or offsets[0] != 0 or sizes.min() < 0 or ends[-1] != count:
            raise ArgumentError(f"EmbeddingBag: offsets: expected some from 0 up to {count}, got {offsets.tolist()}")
        if self.mode == "max":  # shorter bags have their last entry again
            at = np.minimum(np.arange(max(int(sizes.max()), 1)), np.maximum(sizes, 1)[:, None] - 1)
            at = np.minimum(offsets[: len(ends), None] + at, count - 1)
            each = F.reshape(F.index_select(entries, 0, at.reshape(-1)), (*at.shape, -1))
            largest, _ = F.max(each, 1)
            return F.masked_fill(largest, Tensor((sizes == 0)[:, None], entries.device), 0.0)
        of_bag = Tensor(np.repeat(np.arange(sizes.size, dtype=np.int32), sizes), entries.device)
        sums = F.spread(entries, 0, of_bag, sizes.size)
        return (
            sums / Tensor(np.maximum(sizes, 1)[:, None].astype(np.float32), sums.device)
            if self.mode == "mean"
            else sums
        )


class Dropout(Activation):
    """x with each element set to 0 with probability p, else divided by 1 - p, in training; x itself in `eval()`.

    inplace: x itself gets the result.

    The random numbers are those of the device's RandomStream, which `manual_seed` seeds, for each rank another.

    Attributes:
        stream: draws the numbers in place of the device's; None: the device's does.

    Raises ArgumentError unless p is from 0 to 1.
    """

    _function, _settings = staticmethod(F.dropout), ("p", "training", "stream")
    stream: RandomStream | None = None

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__(inplace)
        check_probability("Dropout", p)
        self.p = p


class Dropout2d(Dropout):
    """x [N, C, ...] with each channel set to 0 with probability p, else divided by 1 - p; x itself in `eval()`."""

    def of(self, x: Tensor) -> Tensor:
        return super().of(x) if x.ndim < 3 else F.dropout2d(x, self.p, self.training, stream=self.stream)


class Dropout1d(Dropout2d):
    """x [N, C, L] with each channel set to 0 with probability p, else divided by 1 - p; x itself in `eval()`."""


class Dropout3d(Dropout2d):
    """x [N, C, D, H, W] with each channel set to 0 with probability p, else divided by 1 - p; x itself in `eval()`."""


class Flatten(FunctionLayer):
    """x [N, ...] -> [N, rest], the dimensions from `start_dim` on merged into one."""

    _function, _settings = staticmethod(F.flatten), ("start_dim",)

    def __init__(self, start_dim: int = 1):
        self.start_dim = start_dim
