"""Exported models compute in onnxruntime what they compute here, for any number of samples."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from clcomm.engine import (  # noqa: E402
    AdaptiveAvgPool2d,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    MultiheadAttention,
    Parameter,
    Tensor,
    fused,
)
from clcomm.engine import functional as F  # noqa: E402
from clcomm.errors import ArgumentError, CheckpointWriteError  # noqa: E402
from clcomm.weights import export_onnx  # noqa: E402
from models import GPT, MLP, ConvNet, LeNet, ResNet  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.weights.architectures import ARCHITECTURES, ours  # noqa: E402


def assert_computes_the_same(model, in_shape, path, tokens=0):
    """tokens: how many there are, for a model whose input is indices."""
    export_onnx(model, path, in_shape, in_dtype="int32" if tokens else "float32")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for samples in (1, 3, 5, 8):
        rng = np.random.default_rng(samples)
        shape = (samples, *in_shape)
        x = rng.integers(0, tokens, shape).astype(np.int32) if tokens else rng.standard_normal(shape).astype(np.float32)
        (found,) = session.run(None, {"x": x})
        expected = model.eval()(Tensor(x)).numpy()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer(name, tmp_path):
    assert_computes_the_same(ours(name), ARCHITECTURES[name][0], tmp_path / "model.onnx")


@pytest.mark.parametrize("build", [MLP, ConvNet, LeNet])
def test_the_models_of_this_repository(build, tmp_path):
    assert_computes_the_same(build(seed=3), (1, 28, 28), tmp_path / "model.onnx")


def test_a_residual_network(tmp_path):
    assert_computes_the_same(ResNet((3, 32, 32), seed=3), (3, 32, 32), tmp_path / "model.onnx")


@pytest.mark.parametrize("options", [
    {}, {"tied": False, "approximate": "none"}, {"layers": 1, "heads": 1, "width": 8}, {"heads": 4, "width": 12},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("places", [1, 3, 15])
def test_a_language_model(options, places, tmp_path):
    model = GPT(**{"vocabulary": 11, "context": 15, "layers": 3, "width": 12, "heads": 3, "seed": 3} | options)
    for parameter in model.parameters():  # the initial ones are so small that attention is nearly even
        parameter.copy_from(
            np.random.default_rng(parameter.numel()).standard_normal(parameter.shape).astype(np.float32)
        )
    assert_computes_the_same(model, (places,), tmp_path / "model.onnx", tokens=11)


class Residual(Module):
    """Sums, products, shared and frozen parameters, a parameter named as the input is, and a constant."""

    def __init__(self):
        self.layer, self.x = Linear(4, 4), Parameter(np.linspace(0.5, 2, 4, dtype=np.float32))
        self.layer.bias.requires_grad = False
        self.again = self.layer

    def forward(self, x):
        y = F.relu(self.layer(x) * self.x) + x
        y = self.again(y) - Tensor(np.full((1, 4), 0.25, np.float32), x.device)
        return y / (self.x * self.x) @ F.transpose(self.layer.weight)


def test_a_module_of_ones_own(tmp_path):
    assert_computes_the_same(Residual(), (4,), tmp_path / "model.onnx")


def test_fused_functions(tmp_path):
    class Gated(Module):
        def __init__(self):
            super().__init__()
            self.linear = Linear(4, 6)

        def forward(self, x):
            return gate(self.linear(x))

    gate = fused(lambda x: x * F.sigmoid(x) + 0.5 * x)
    assert_computes_the_same(Gated(), (4,), tmp_path / "model.onnx")


def test_a_softmax_along_another_dimension(tmp_path):
    class Channels(Module):
        def forward(self, x):
            return F.softmax(x, 1)

    assert_computes_the_same(Channels(), (3, 2, 4), tmp_path / "model.onnx")


class Pairs(Module):
    """Products of batches, each factor lying either way round."""

    def __init__(self):
        self.layer = Linear(4, 5)

    def forward(self, x):
        pairs = F.matmul(x, x, transpose_b=True) @ x
        return F.matmul(F.matmul(x, pairs, transpose_a=True), self.layer.weight, transpose_b=True)


def test_batches_of_products(tmp_path):
    assert_computes_the_same(Pairs(), (3, 4), tmp_path / "model.onnx")


@pytest.mark.parametrize("axis", [1, 2, 3, -1, (1, 3), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize("in_shape", [(4, 2, 5), (4, 1, 5)], ids=str)
def test_sums(name, axis, keepdims, in_shape, tmp_path):
    class Summing(Module):
        def forward(self, x):
            return getattr(F, name)(F.tanh(x), axis, keepdims)

    assert_computes_the_same(Summing(), in_shape, tmp_path / "model.onnx")


PARTS = [
    np.s_[:, 1:3], np.s_[:, ::-1], np.s_[:, 4:1:-2], np.s_[:, 3::-3, 1], np.s_[..., 0], np.s_[:, -2:, None, ::2],
    np.s_[:, 2, :, -1], np.s_[:, :, ::-1, 1:],
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_slices(part, tmp_path):
    class Taking(Module):
        def forward(self, x):
            return F.tanh(x)[part]

    assert_computes_the_same(Taking(), (6, 3, 4), tmp_path / "model.onnx")


class Words(Module):
    """A small language model's layers: tokens and places are looked up, the last place is classified."""

    def __init__(self, tokens, places):
        self.token, self.place = Embedding(tokens, 6), Embedding(places, 6, padding_idx=0)
        self.norm, self.layer, self.places = LayerNorm(6), Linear(6, tokens), places

    def forward(self, x):
        hidden = self.token(x) + self.place(np.arange(self.places))
        hidden = hidden + F.gelu(self.norm(hidden)) * self.token(x).mean(1, keepdims=True)
        return self.layer(hidden[:, -1])


@pytest.mark.parametrize("places", [1, 3, 5])
def test_indices_as_input(places, tmp_path):
    path = tmp_path / "model.onnx"
    assert_computes_the_same(Words(11, places), (places,), path, tokens=11)
    with pytest.raises(ArgumentError, match="in_dtype: expected 'float32' or 'int32', got 'int64'"):
        export_onnx(Words(11, places), path, (places,), in_dtype="int64")


class Computing(Module):
    """A function of the input, beside layers."""

    def __init__(self, compute, **layers):
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.compute(self, x)


@pytest.mark.parametrize("in_shape", [(4,), (3, 4), (5, 3, 4), (3, 3, 3, 4)], ids=str)
@pytest.mark.parametrize("relu", [False, True])
def test_linear_layers_of_any_number_of_dimensions(in_shape, relu, tmp_path):
    model = Computing(
        lambda own, x: own.last(F.linear(x, own.first.weight, own.first.bias, relu=relu)),
        first=Linear(4, 3), last=Linear(3, 5, bias=False),
    )  # fmt: skip
    assert_computes_the_same(model, in_shape, tmp_path / "model.onnx")


MASKS = {
    "none": None,
    "causal": None,
    "numbers": np.linspace(-3, 2, 20).reshape(4, 5).astype(np.float32),
    "flags": np.tril(np.ones((4, 5), bool)),
    "nothing seen": np.arange(20).reshape(4, 5) > 9,
    "one row": np.array([[True, False, True, True, False]]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("before", [(), (3,), (2, 3), (3, 2, 2)], ids=str)
def test_attention_of_separate_tensors(mask, before, tmp_path):
    def compute(own, x):
        keys = F.tanh(x[..., :1, :]) * own.keys  # [..., 5, 6]
        values = (x[..., 1:2, :] + own.keys)[..., :3]
        return F.scaled_dot_product_attention(x, keys, values, MASKS[mask], is_causal=mask == "causal", scale=0.7)

    model = Computing(compute, keys=Parameter(np.linspace(-1, 1, 30).reshape(5, 6).astype(np.float32)))
    assert_computes_the_same(model, (*before, 4, 6), tmp_path / "model.onnx")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_attention_with_a_mask_for_each_head(mask, heads, tmp_path):
    given = None if MASKS[mask] is None else np.broadcast_to(MASKS[mask], (heads, 4, 5))[..., :4]
    own = MultiheadAttention(6, heads, batch_first=True)

    def among_themselves(model, x):
        added = given if given is None or given.dtype != bool else ~given
        return model.attention(x, need_weights=False, attn_mask=added, is_causal=mask == "causal")[0]

    assert_computes_the_same(Computing(among_themselves, attention=own), (4, 6), tmp_path / "own.onnx")

    def to_others(model, x):
        return model.attention(x, x * 0.5, x + 1.0, need_weights=False, is_causal=mask == "causal")[0]

    assert_computes_the_same(Computing(to_others, attention=own), (4, 6), tmp_path / "others.onnx")


OTHERS = {
    "pads": ((2, 3), lambda own, x: F.pad(F.tanh(x), ((0, 0), (1, 2), (0, 3)), 0.5)),
    "stacked": ((2, 3), lambda own, x: F.stack([x, F.tanh(x)], 2) * F.stack([x, x, x])[1:2, ..., None, :].squeeze(0)),
    "numbers": ((4,), lambda own, x: 1.5 - x * 2.0 + 3.0 / (x * x + 1.0)),
    "log of sums": ((3, 4), lambda own, x: F.logsumexp(x)),
    "means of windows": ((2, 7, 5), lambda own, x: own.pool(x)),
    "transposed convolution": ((2, 4, 3), lambda own, x: own.up(x)),
    "convolution in groups": ((4, 6, 5), lambda own, x: own.groups(x)),
    "samples in rows": ((3, 4), lambda own, x: F.reshape(F.tanh(F.reshape(x, (-1, 2))), (-1, 3, 4))),
    "samples behind": ((3, 4), lambda own, x: F.transpose(F.transpose(x, (1, 0, 2)), (1, 2, 0))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_operations(kind, tmp_path):
    in_shape, compute = OTHERS[kind]
    layers = {
        "pool": AdaptiveAvgPool2d((3, 2)), "up": ConvTranspose2d(2, 3, 3, 2, 1, output_padding=1),
        "groups": Conv2d(4, 6, 3, groups=2),
    }  # fmt: skip
    assert_computes_the_same(Computing(compute, **layers), in_shape, tmp_path / "model.onnx")


class Summed(Module):
    def forward(self, x):
        return x.sum(0)


class Mixing(Module):
    def forward(self, x):
        return F.reshape(x, (x.shape[0] * 2, -1))


REFUSED = {
    "got SquaredError": lambda own, x: F.mse_loss(x, x),
    "sizes that grow with the number of samples or not at all": lambda own, x: F.pad(x, ((1, 0), (0, 0))),
    "got a part of the first dimension": lambda own, x: x[:1] + x,
    r"got \(2, 4\) for 3 and \(4, 4\) for 5": lambda own, x: x[1:],
    "got a concat along the first dimension": lambda own, x: F.concat([x, x]),
    "samples to stay the first dimension": lambda own, x: F.transpose(x),
    "one dimension of samples": lambda own, x: F.reshape(F.matmul(x, F.transpose(x)), (-1, x.shape[0])),
    "got attention between them": lambda own, x: F.scaled_dot_product_attention(x, x, x),
    "do not depend on the number of samples": lambda own, x: x * Tensor(np.ones((x.shape[0], 1), np.float32), x.device),
    "the same operations for any number": lambda own, x: F.tanh(x) if x.shape[0] == 3 else F.relu(x),
}


def test_what_cannot_be_exported_is_an_error_of_one_line(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    refused = {
        **{message: Computing(compute) for message, compute in REFUSED.items()},
        "got a sum over the first dimension": Summed(),
        "got a result of shape \\(6, 2\\) for 3 samples": Mixing(),
    }
    for message, model in refused.items():
        with pytest.raises(ArgumentError, match=message) as error:
            export_onnx(model, path, (4,))
        one_line(error)
    with pytest.raises(ArgumentError):
        export_onnx(Linear(4, 2), path, (5,))
    assert not path.exists()
    with pytest.raises(CheckpointWriteError, match="could not be written") as error:
        export_onnx(Linear(4, 2), tmp_path, (4,))
    one_line(error)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ArgumentError, match=r"pip install 'clcomm\[onnx\]'"):
        export_onnx(Linear(4, 2), path, (4,))
