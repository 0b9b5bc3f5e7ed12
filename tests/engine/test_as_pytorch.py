"""Layers written as for PyTorch: the same text makes both, whose results and gradients are compared."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import Tensor, nn
from clcomm.engine import functional as F
from tests.engine.values import assert_close, drawn

ROWS, IMAGES, VOLUMES = (3, 4, 19), (2, 4, 11, 10), (2, 4, 5, 6, 7)


def padded(*layers: str) -> tuple[str, ...]:
    """Return layers that pad by each mode other than zeros, of texts without the end."""
    return tuple(f"{each}, padding_mode={mode!r})" for each in layers for mode in ("reflect", "replicate", "circular"))


#: Shapes of inputs, and what is written of layers and functions of x.
LAYERS = {
    ROWS: (
        "nn.Conv1d(4, 6, 5)", "nn.Conv1d(4, 6, 3, 2, 1)", "nn.Conv1d(4, 8, 3, 1, 'same', 2, 4, False)",
        "nn.Conv1d(4, 5, 4, padding='same')",
        "nn.Sequential(nn.Conv1d(4, 5, 3), nn.ReLU(), nn.MaxPool1d(2))",
        "nn.Conv1d(4, 5, (3,), (1,), (2,))", "nn.ConvTranspose1d(4, 6, 4, 2, 1)",
        "nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2)", "nn.MaxPool1d(3)", "nn.MaxPool1d(3, 2, 1, ceil_mode=True)",
        "nn.AvgPool1d(4, 3)", "nn.AvgPool1d(3, 2, 1, True, False)", "nn.AdaptiveAvgPool1d(5)", "nn.BatchNorm1d(4)",
        "nn.InstanceNorm1d(4)", "nn.Upsample(scale_factor=2)", "nn.Upsample(30, mode='linear')",
        "nn.Upsample(scale_factor=1.7, mode='nearest')", "nn.Softmax()", "nn.LogSoftmax()",
        *padded("nn.Conv1d(4, 3, 3, 2, 2", "nn.Conv1d(4, 3, 2, 1, 'same', 3"),
    ),
    IMAGES: (
        "nn.Conv2d(4, 6, 3, padding='same')", "nn.Conv2d(4, 6, (2, 3), padding='same', dilation=(3, 2))",
        "nn.Sequential(nn.Conv2d(4, 6, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))",
        "nn.Sequential(nn.Conv2d(4, 6, 3, padding='same'), nn.ReLU(), nn.MaxPool2d(2))",
        "nn.Conv2d(4, 6, 3, padding='valid')", "nn.Conv2d(4, 6, (3, 5), (2, 1), (1, 2))",
        "nn.Conv2d(4, 6, 3, (2, 4), 1)", "nn.Conv2d(4, 6, 3, (2, 2), 1)",
        "nn.ConvTranspose2d(4, 6, 3, (2, 2), 1, (1, 1))",
        "nn.MaxPool2d(3, 2, ceil_mode=True)", "nn.MaxPool2d((2, 3), (3, 2), (1, 0), 1, False, True)",
        "nn.MaxPool2d(2, 2, 1, ceil_mode=True)", "nn.AvgPool2d(3, 2, 1, True)", "nn.AvgPool2d(3, 2, 1, True, False)",
        "nn.AvgPool2d(3, 2, 1, count_include_pad=False)", "nn.AvgPool2d(2, divisor_override=3)",
        "nn.AvgPool2d((3, 4), (2, 3), ceil_mode=True)", "nn.AdaptiveMaxPool2d(3)", "nn.AdaptiveMaxPool2d((4, 5))",
        "nn.AdaptiveMaxPool2d((None, 3))", "nn.InstanceNorm2d(4, affine=True)", "nn.PixelShuffle(2)",
        "nn.Upsample(scale_factor=2)", "nn.Upsample((7, 23), mode='bilinear')",
        "nn.Upsample(scale_factor=(1.5, 2.3), mode='bilinear')",
        "nn.Upsample(scale_factor=2, mode='bilinear', align_corners=True)",
        "nn.Upsample(scale_factor=1.5, recompute_scale_factor=True)", "nn.Upsample((5, 17), mode='nearest-exact')",
        "nn.Softmax(1)", "nn.LogSoftmax(-1)", "nn.ReLU()", "nn.Sigmoid()", "nn.Tanh()", "nn.Flatten()",
        "nn.AvgPool2d(2)", "nn.Softmax()",
        *(f"nn.AdaptiveAvgPool2d({size})" for size in (1, (None, None), (2, None), (9, 4), (12, 3))),
        *padded("nn.Conv2d(4, 3, (3, 4), 1, (1, 2)", "nn.Conv2d(4, 3, (3, 4), 1, 'same'",
                "nn.Conv2d(4, 3, 3, (2, 1), 'valid'"),
    ),
    (2, 3, 6, 8): ("nn.PixelUnshuffle(2)",),
    (4, 7, 5, 31): (
        *(f"nn.LayerNorm((5, 31), {more})" for more in ("", "elementwise_affine=False", "bias=False")),
        *(f"nn.{name}" for name in (
            "Identity(3, a=4)", "ELU(0.5)", "Softplus(2.0)", "Mish()", "Hardtanh(-2.0, 0.5)", "ReLU6()",
            "Hardsigmoid()", "Hardswish()", "PReLU()", "PReLU(7, 0.1)", "RMSNorm(31)", "RMSNorm((5, 31), 1e-3)",
            "RMSNorm(31, elementwise_affine=False)",
        )),
    ),
    VOLUMES: tuple(f"nn.{name}" for name in (
        "Conv3d(4, 6, 3)", "Conv3d(4, 6, (2, 3, 1), (2, 1, 2), (1, 0, 1))", "Conv3d(4, 6, 2, 1, 1, (2, 1, 2), 2)",
        "Conv3d(4, 4, 3, padding='same', groups=4)", "ConvTranspose3d(4, 6, 3)",
        "ConvTranspose3d(4, 6, (2, 3, 3), (3, 2, 2), (1, 1, 0), (2, 1, 1), 2)",
        "ConvTranspose3d(4, 6, 2, 1, 1, 0, 1, False, 2)", "BatchNorm3d(4)", "InstanceNorm3d(4, affine=True)",
        "MaxPool3d(2)", "MaxPool3d((2, 3, 2), (1, 2, 2), 1)", "MaxPool3d(3, 2, 1, ceil_mode=True)", "AvgPool3d(2)",
        "AvgPool3d(3, 2, 1, True)", "AvgPool3d(3, 2, 1, False, False)", "AvgPool3d(3, 2, 1, True, False)",
        "AvgPool3d(2, divisor_override=3)", "AdaptiveAvgPool3d((2, None, 3))", "AdaptiveMaxPool3d((2, 4, 3))",
        "ZeroPad3d(1)", "ConstantPad3d(1, 2.0)", "ReflectionPad3d(2)", "ReplicationPad3d((1, 2, 0, 1, 2, 0))",
        "Dropout3d(0.5).eval()",
    )) + padded("nn.Conv3d(4, 3, 3, 1, (1, 0, 2)", "nn.Conv3d(4, 3, 2, 1, 'same'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel", "ignore:Implicit dimension choice")
@pytest.mark.parametrize(("shape", "text"), [(shape, text) for shape, texts in LAYERS.items() for text in texts])
def test_a_layer_of_the_same_text_is_pytorchs(torch, shape, text):
    theirs = eval(text, {"nn": torch.nn})
    ours = eval(text, {"nn": nn})
    compare(torch, ours, theirs, [drawn(1, *shape)])
    if "Pool" in text:  # of equal ones the first has the gradient
        compare(torch, ours, theirs, [np.round(drawn(1, *shape))])


def compare(torch, ours, theirs, arrays):
    """Compare the results of arrays and all gradients, of modules with the same weights."""
    gradients = []
    if isinstance(theirs, torch.nn.Module):
        state = {name: value.numpy() for name, value in theirs.state_dict().items()}
        ours.load_state_dict({name: state[name] for name in ours.state_dict()})
        assert ours.state_dict().keys() == state.keys()
    xs = [Tensor(array, requires_grad=array.dtype == np.float32) for array in arrays]
    ts = [torch.tensor(array, requires_grad=array.dtype == np.float32) for array in arrays]
    y, expected = ours(*xs), theirs(*ts)
    assert_close(y.numpy(), expected.detach().numpy())
    factor = drawn(9, *y.shape)
    y.backward(Tensor(factor))
    expected.backward(torch.tensor(factor))
    gradients += [(x.grad, t.grad) for x, t in zip(xs, ts, strict=True) if t.grad is not None]
    if isinstance(theirs, torch.nn.Module):
        names = dict(theirs.named_parameters())
        gradients += [(parameter.grad, names[name].grad) for name, parameter in ours.named_parameters()]
    for actual, reference in gradients:
        assert_close(actual.numpy(), reference.numpy())


MASK = np.triu(np.ones((5, 7), bool), 3)
PADDING = np.arange(7) >= np.array([[7], [5], [4]])
ADDED = drawn(3, 12, 5, 7)


@pytest.mark.parametrize("given", [
    {}, {"attn_mask": MASK}, {"key_padding_mask": PADDING}, {"attn_mask": ADDED},
    {"attn_mask": MASK, "key_padding_mask": PADDING},
    {"key_padding_mask": np.where(PADDING, -1e9, 0).astype(np.float32)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_with_masks_and_weights_is_pytorchs(torch, given, need_weights, batch_first):
    sizes = (8, 4)
    theirs = torch.nn.MultiheadAttention(*sizes, batch_first=batch_first)
    ours = nn.MultiheadAttention(*sizes, batch_first=batch_first)

    def joined(module, make, cat):
        def call(q, k):
            named = {name: make(mask) for name, mask in given.items()}
            y, weights = module(q, k, k, need_weights=need_weights, **named)
            assert (weights is not None) == need_weights
            return y if weights is None else cat([y.reshape(-1), weights.reshape(-1)])

        return call

    class Ours(nn.Module):
        def __init__(self):
            self.layer, self.forward = ours, joined(ours, Tensor, F.concat)

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.forward = theirs, joined(theirs, torch.tensor, torch.cat)

    q, k = drawn(1, 3, 5, 8), drawn(2, 3, 7, 8)
    arrays = [q, k] if batch_first else [q.transpose(1, 0, 2).copy(), k.transpose(1, 0, 2).copy()]
    compare(torch, Ours(), Theirs(), arrays)


@pytest.mark.parametrize("text", [
    "nn.TransformerEncoderLayer(8, 2, 12, 0.0)", "nn.TransformerEncoderLayer(8, 2, 12, 0.0, 'gelu', norm_first=True)",
    "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 6, 0.0, batch_first=True), 2, nn.LayerNorm(8))",
    "nn.TransformerDecoderLayer(8, 2, 12, 0.0, bias=False)",
    "nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True), 2)",
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_transformer_of_the_same_text_is_pytorchs(torch, text):
    ours, theirs = eval(text, {"nn": nn}), eval(text, {"nn": torch.nn})
    compare(torch, ours, theirs, [drawn(1, 5, 3, 8), *([drawn(2, 5, 3, 8)] if "Decoder" in text else [])])
    if "Decoder" not in text and "batch_first" not in text:
        mask = np.triu(np.ones((5, 5), bool), 1)
        own = ours(Tensor(drawn(1, 5, 3, 8)), Tensor(mask), is_causal=True)
        other = theirs(torch.tensor(drawn(1, 5, 3, 8)), torch.tensor(mask), is_causal=True)
        assert_close(own.numpy(), other.detach().numpy())


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_a_bag_of_embeddings_is_pytorchs(torch, mode):
    indices = np.random.default_rng(1).integers(0, 9, (4, 5)).astype(np.int32)
    compare(torch, nn.EmbeddingBag(9, 3, mode=mode), torch.nn.EmbeddingBag(9, 3, mode=mode), [indices])


@pytest.mark.parametrize("text", [
    "nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2)", "nn.ConvTranspose2d(4, 3, 3, (1, 2), 1, (0, 1))",
    "nn.ConvTranspose2d(4, 2, 2, stride=(3, 1), bias=False, dilation=(1, 2))", "nn.ConvTranspose2d(4, 4, 1, (2, 5))",
    "nn.ConvTranspose3d(4, 2, 2, (2, 1, 3), 1, (1, 0, 2))",
])  # fmt: skip
def test_transposed_convolutions_with_a_stride_of_each_direction_are_pytorchs(torch, text):
    ours, theirs = eval(text, {"nn": nn}), eval(text, {"nn": torch.nn})
    compare(torch, ours, theirs, [drawn(1, 2, 4, 5, 4, *[6] * ("3d" in text))])


def test_dropout_behind_selu_keeps_mean_and_variance():
    x = Tensor(drawn(1, 200, 300))
    assert F.alpha_dropout(x, 0.3, False) is x and nn.AlphaDropout(0.3).eval()(x) is x
    dropped = nn.AlphaDropout(0.3)(x).numpy()
    limit = np.float32(1.6732632423543772 * -1.0507009873554805)
    scale = (0.7 * (1 + 0.3 * limit**2)) ** -0.5
    lowest = np.isclose(dropped, 0.7 * limit * scale, atol=1e-5)
    assert lowest.mean() == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(dropped[~lowest], ((x.numpy() - limit * 0.3) * scale)[~lowest], rtol=1e-4, atol=1e-5)
    assert dropped.mean() == pytest.approx(x.numpy().mean(), abs=0.02)
    assert dropped.std() == pytest.approx(x.numpy().std(), abs=0.02)


def test_dropped_weights_of_attention_are_scaled(torch):
    q, v = Tensor(drawn(1, 2, 64, 8)), Tensor(np.ones((2, 64, 8), np.float32))
    sums = F.scaled_dot_product_attention(q, q, v, None, 0.25).numpy()
    assert sums.mean() == pytest.approx(1.0, abs=0.05)
    assert sums.std() > 0.05
    layer = nn.MultiheadAttention(8, 2, 0.9, batch_first=True)
    assert np.abs(layer(q, need_weights=False)[0].numpy() - layer(q, need_weights=False)[0].numpy()).max() > 1e-3
    layer.eval()
    np.testing.assert_array_equal(layer(q, need_weights=False)[0].numpy(), layer(q, need_weights=False)[0].numpy())
