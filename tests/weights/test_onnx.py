"""Exported models compute in onnxruntime what they compute here, for any number of samples."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from clcomm.engine import Embedding, LayerNorm, Linear, Module, Parameter, Tensor  # noqa: E402
from clcomm.engine import functional as F  # noqa: E402
from clcomm.errors import ArgumentError, CheckpointWriteError  # noqa: E402
from clcomm.weights import export_onnx  # noqa: E402
from models import MLP, ConvNet  # noqa: E402
from tests.helpers import one_line  # noqa: E402
from tests.weights.architectures import ARCHITECTURES, ours  # noqa: E402


def assert_computes_the_same(model, in_shape, path):
    export_onnx(model, path, in_shape)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for samples in (1, 3, 8):
        x = np.random.default_rng(samples).standard_normal((samples, *in_shape)).astype(np.float32)
        (found,) = session.run(None, {"x": x})
        expected = model.eval()(Tensor(x)).numpy()
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer(name, tmp_path):
    assert_computes_the_same(ours(name), ARCHITECTURES[name][0], tmp_path / "model.onnx")


@pytest.mark.parametrize("build", [MLP, ConvNet])
def test_the_models_of_this_repository(build, tmp_path):
    assert_computes_the_same(build(seed=3), (1, 28, 28), tmp_path / "model.onnx")


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


@pytest.mark.parametrize("places", [1, 5])
def test_indices_as_input(places, tmp_path):
    model, path = Words(11, places), tmp_path / "model.onnx"
    export_onnx(model, path, (places,), in_dtype="int32")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for samples in (1, 3, 8):
        x = np.random.default_rng(samples).integers(0, 11, (samples, places)).astype(np.int32)
        (found,) = session.run(None, {"x": x})
        np.testing.assert_allclose(found, model(Tensor(x)).numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="in_dtype: expected 'float32' or 'int32', got 'int64'"):
        export_onnx(model, path, (places,), in_dtype="int64")


class Summed(Module):
    def forward(self, x):
        return x.sum(0)


class Part(Module):
    def forward(self, x):
        return x[1:]


class Padded(Module):
    def forward(self, x):
        return F.pad(x, ((0, 0), (1, 1)))


class Mixing(Module):
    def forward(self, x):
        return F.reshape(x, (x.shape[0] * 2, -1))


def test_what_cannot_be_exported_is_an_error_of_one_line(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    refused = {
        Padded(): "got Pad",
        Summed(): "got a sum over the first dimension",
        Part(): "got a part of the first dimension",
        Mixing(): "samples to stay the first dimension",
    }
    for model, message in refused.items():
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
