"""Functions and layers, written once for both libraries: `torch` is PyTorch or `clcomm.as_torch`.

A case gets the library and the floats of its tensor, and returns a function of that tensor. "4 KiB" is the tensor's
size; what a function reads besides, such as weights, is left out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Sizes of the tensor in floats: 4 KiB, 256 KiB, 4 MiB.
SIZES = {"4 KiB": 1 << 10, "256 KiB": 1 << 16, "4 MiB": 1 << 20}
#: The way in which the Trainer runs a step.
REPLAYED = "replayed"
Function = Callable[[Any], Any]
Make = Callable[[Any, tuple[int, ...]], Function]


def shape_of(kind: str, floats: int) -> tuple[int, ...]:
    """Return the shape of a case's tensor: rows and columns, images, sequences, or a batch of matrices."""
    if kind == "rows":
        columns = min(1024, max(32, floats // 32))
        return floats // columns, columns
    if kind == "images":  # of 16 channels
        side = 8 if floats < 1 << 16 else 16
        return floats // (16 * side * side), 16, side, side
    if kind == "signals":
        length = 32 if floats < 1 << 16 else 128
        return floats // (16 * length), 16, length
    if kind == "steps":  # T N C of recurrent layers
        return (4, 8, 32) if floats < 1 << 16 else (16, 32, 128) if floats < 1 << 20 else (32, 128, 256)
    return floats // 1024, 32, 32


def of_tensor(name: str, *arguments: Any, **named: Any) -> Make:
    """Return a case of a tensor's method."""
    return lambda torch, shape: lambda x: getattr(x, name)(*arguments, **named)


def of_functional(name: str, *arguments: Any, **named: Any) -> Make:
    return lambda torch, shape: lambda x: getattr(torch.nn.functional, name)(x, *arguments, **named)


def with_other(function: Callable[[Any, Any, Any], Any]) -> Make:
    """Return a case of the tensor and a second one of its shape."""

    def make(torch: Any, shape: tuple[int, ...]) -> Function:
        other = torch.rand(*shape) + 0.5
        return lambda x: function(torch, x, other)

    return make


class OfLayer:
    """A function of a tensor by a layer, whose parameters get gradients too."""

    def __init__(self, layer: Any, first: bool = False, is_attention: bool = False):
        self.layer, self._first, self._is_attention = layer, first, is_attention

    def __call__(self, x: Any) -> Any:
        result = self.layer(x, x, x, need_weights=False) if self._is_attention else self.layer(x)
        return result[0] if self._first else result


def with_layer(make_layer: Callable[[Any, tuple[int, ...]], Any], first: bool = False) -> Make:
    """Return a case of a layer with its parameters' gradients; first: its first result is taken."""

    def make(torch: Any, shape: tuple[int, ...]) -> Function:
        return OfLayer(make_layer(torch, shape), first)

    return make


def _classes(torch: Any, shape: tuple[int, ...], columns: int) -> Any:
    return torch.arange(shape[0]) % columns


def _rows_of(torch: Any, shape: tuple[int, ...]) -> Function:
    places = (torch.arange(shape[0]) * 7) % shape[0]
    return lambda x: torch.nn.functional.embedding(places, x)


def _gather(torch: Any, shape: tuple[int, ...]) -> Function:
    places = ((torch.arange(shape[0] * shape[1]) * 7) % shape[1]).view(*shape)
    return lambda x: x.gather(1, places)


def _cross_entropy(torch: Any, shape: tuple[int, ...]) -> Function:
    targets = _classes(torch, shape, shape[1])
    return lambda x: torch.nn.functional.cross_entropy(x, targets)


def _encoder(torch: Any, shape: tuple[int, ...]) -> Any:
    return torch.nn.TransformerEncoderLayer(shape[2], 4, 4 * shape[2], dropout=0.0, batch_first=True)


def _self_attention(torch: Any, shape: tuple[int, ...]) -> Function:
    return OfLayer(torch.nn.MultiheadAttention(shape[2], 4, batch_first=True), True, is_attention=True)


_UNARY = ("exp", "log", "sqrt", "rsqrt", "abs", "sin", "cos", "erf", "tanh", "sigmoid", "square")
_ACTIVATIONS = ("relu", "gelu", "silu", "softplus", "elu", "mish", "hardswish", "leaky_relu", "relu6", "logsigmoid")

#: By name the kind of its shape and the case.
CASES: dict[str, tuple[str, Make]] = {
    **{name: ("rows", of_tensor(name)) for name in _UNARY},
    **{name: ("rows", of_functional(name)) for name in _ACTIVATIONS},
    "clamp": ("rows", of_tensor("clamp", -0.5, 0.5)),
    "pow 3": ("rows", of_tensor("pow", 3)),
    "x + y": ("rows", with_other(lambda torch, x, y: x + y)),
    "x * y": ("rows", with_other(lambda torch, x, y: x * y)),
    "x / y": ("rows", with_other(lambda torch, x, y: x / y)),
    "maximum": ("rows", with_other(lambda torch, x, y: torch.maximum(x, y))),
    "where": ("rows", with_other(lambda torch, x, y: torch.where(x > 0.5, x, y))),
    "masked_fill": ("rows", lambda torch, shape: lambda x: x.masked_fill(x > 0.5, 0.0)),
    "sum": ("rows", of_tensor("sum", 1)),
    "sum of all": ("rows", of_tensor("sum")),
    "sum of columns": ("rows", of_tensor("sum", 0)),
    "mean": ("rows", of_tensor("mean", 1)),
    "max": ("rows", lambda torch, shape: lambda x: x.max(1)[0]),
    "std": ("rows", of_tensor("std", 1)),
    "norm": ("rows", of_tensor("norm")),
    "prod": ("rows", of_tensor("prod", 1)),
    "cumsum": ("rows", of_tensor("cumsum", 1)),
    "sort": ("rows", lambda torch, shape: lambda x: x.sort(1)[0]),
    "topk 8": ("rows", lambda torch, shape: lambda x: x.topk(8)[0]),
    "softmax": ("rows", of_functional("softmax", -1)),
    "log_softmax": ("rows", of_functional("log_softmax", -1)),
    "logsumexp": ("rows", of_tensor("logsumexp", 1)),
    "layer norm": ("rows", with_layer(lambda torch, shape: torch.nn.LayerNorm(shape[1]))),
    "RMS norm": ("rows", with_layer(lambda torch, shape: torch.nn.RMSNorm(shape[1]))),
    "batch norm": ("images", with_layer(lambda torch, shape: torch.nn.BatchNorm2d(shape[1]))),
    "group norm": ("images", with_layer(lambda torch, shape: torch.nn.GroupNorm(4, shape[1]))),
    "instance norm": ("images", with_layer(lambda torch, shape: torch.nn.InstanceNorm2d(shape[1], affine=True))),
    "transposed copy": ("rows", lambda torch, shape: lambda x: x.transpose(0, 1).contiguous()),
    "permuted copy": ("images", lambda torch, shape: lambda x: x.permute(0, 2, 3, 1).contiguous()),
    "cat": ("rows", with_other(lambda torch, x, y: torch.cat((x, y), 1))),
    "stack": ("rows", with_other(lambda torch, x, y: torch.stack((x, y)))),
    "slice": ("rows", lambda torch, shape: lambda x: x[:, 1:-1] * 2),
    "rows by index": ("rows", _rows_of),
    "gather": ("rows", _gather),
    "flip": ("rows", lambda torch, shape: lambda x: x.flip(1)),
    "roll": ("rows", lambda torch, shape: lambda x: x.roll(1, 1)),
    "repeat": ("rows", lambda torch, shape: lambda x: x.repeat(2, 1)),
    "tril": ("matrices", of_tensor("tril")),
    "pad": ("images", of_functional("pad", (1, 1, 1, 1))),
    "cross entropy": ("rows", _cross_entropy),
    "MSE": ("rows", with_other(lambda torch, x, y: torch.nn.functional.mse_loss(x, y))),
    "L1": ("rows", with_other(lambda torch, x, y: torch.nn.functional.l1_loss(x, y))),
    "Huber": ("rows", with_other(lambda torch, x, y: torch.nn.functional.huber_loss(x, y))),
    "BCE of logits": (
        "rows", with_other(lambda torch, x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y - 0.5)),
    ),
    "Linear": ("rows", with_layer(lambda torch, shape: torch.nn.Linear(shape[1], shape[1]))),
    "batched product": ("matrices", with_other(lambda torch, x, y: torch.bmm(x, y))),
    "einsum": ("matrices", with_other(lambda torch, x, y: torch.einsum("bij,bkj->bik", x, y))),
    "Conv1d 3": ("signals", with_layer(lambda torch, shape: torch.nn.Conv1d(16, 32, 3, padding=1))),
    "Conv2d 1x1": ("images", with_layer(lambda torch, shape: torch.nn.Conv2d(16, 32, 1))),
    "Conv2d 3x3": ("images", with_layer(lambda torch, shape: torch.nn.Conv2d(16, 32, 3, padding=1))),
    "Conv2d 3x3, stride 2": ("images", with_layer(lambda torch, shape: torch.nn.Conv2d(16, 32, 3, 2, 1))),
    "Conv2d 3x3, depthwise": (
        "images", with_layer(lambda torch, shape: torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)),
    ),
    "ConvTranspose2d 4x4, stride 2": (
        "images", with_layer(lambda torch, shape: torch.nn.ConvTranspose2d(16, 8, 4, 2, 1)),
    ),
    "max pool": ("images", of_functional("max_pool2d", 2)),
    "average pool": ("images", of_functional("avg_pool2d", 2)),
    "adaptive average pool": ("images", of_functional("adaptive_avg_pool2d", 1)),
    "nearest, scale 2": ("images", of_functional("interpolate", scale_factor=2)),
    "bilinear, scale 2": (
        "images", of_functional("interpolate", scale_factor=2, mode="bilinear", align_corners=False),
    ),
    "pixel shuffle": ("images", of_functional("pixel_shuffle", 2)),
    "RNN": ("steps", with_layer(lambda torch, shape: torch.nn.RNN(shape[2], shape[2]), first=True)),
    "GRU": ("steps", with_layer(lambda torch, shape: torch.nn.GRU(shape[2], shape[2]), first=True)),
    "LSTM": ("steps", with_layer(lambda torch, shape: torch.nn.LSTM(shape[2], shape[2]), first=True)),
    "attention": ("matrices", _self_attention),
    "encoder layer": ("matrices", with_layer(_encoder)),
}  # fmt: skip
