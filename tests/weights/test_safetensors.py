"""Weights between the engine, PyTorch and safetensors files: the same names and bits."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="safetensors is not installed")

from clcomm.base.errors import ArgumentError, CheckpointError, CheckpointWriteError
from clcomm.engine import Linear, ReLU, Sequential, Tensor
from clcomm.engine.weights import load, load_into, save
from models import GPT, MLP, ConvNet
from tests.helpers import one_line
from tests.weights.architectures import ARCHITECTURES, ours, theirs


def of_the_engine(state):
    """Return PyTorch's `state` as the engine has it: its counts of 64 bits have 32 here."""
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    return {name: a.astype(np.int32) if a.dtype == np.int64 else a for name, a in arrays.items()}


def assert_same(one, other):
    assert list(one) == list(other)
    for name, array in one.items():
        expected = np.asarray(other[name])
        assert array.dtype == expected.dtype and array.shape == expected.shape, name
        assert array.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pytorchs_weights_have_our_names_and_bits_both_ways(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from_torch, to_torch, model = theirs(name), theirs(name), ours(name)
    state = {key: tensor.numpy() for key, tensor in from_torch.state_dict().items()}
    model.load_state_dict(state)
    assert_same(model.state_dict(), of_the_engine(from_torch.state_dict()))
    to_torch.load_state_dict({key: torch.from_numpy(array) for key, array in model.state_dict().items()})
    x = np.random.default_rng(1).standard_normal((4, *ARCHITECTURES[name][0])).astype(np.float32)
    with torch.no_grad():
        expected = from_torch(torch.from_numpy(x))
        assert torch.equal(to_torch(torch.from_numpy(x)), expected)
    np.testing.assert_allclose(model(Tensor(x)).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pytorchs_files_are_read_and_ours_are_read_by_it(name, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from safetensors.torch import load_file, save_file

    module, model, path = theirs(name), ours(name), tmp_path / "weights.safetensors"
    save_file(module.state_dict(), path)
    if module.state_dict():
        load_into(model, path)
    save(path, model)
    again = theirs(name)
    again.load_state_dict(load_file(path))
    for key, tensor in again.state_dict().items():
        assert tensor.equal(module.state_dict()[key]), key
    save(path, module)
    assert_same(load(path), {key: tensor.numpy() for key, tensor in sorted(module.state_dict().items())})


@pytest.mark.parametrize("build", [MLP, ConvNet])
def test_the_models_of_this_repository_come_back(build, tmp_path):
    one, other, path = build(seed=1), build(seed=2), tmp_path / "deep" / "weights.safetensors"
    save(path, one, {"made by": "a test"})
    load_into(other, path)
    assert_same(other.state_dict(), one.state_dict())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "int64", "uint8", "bool"])
@pytest.mark.parametrize("lay", [np.ascontiguousarray, np.asfortranarray, lambda a: a[::-1, ::2], lambda a: a.T[1]])
def test_arrays_of_any_dtype_and_layout_come_back(dtype, lay, tmp_path):
    array = lay(np.arange(24).reshape(4, 6).astype(dtype))
    save(tmp_path / "a", {"a": array, "scalar": np.asarray(array.flat[3])})
    found = load(tmp_path / "a")
    assert found["a"].dtype == dtype and np.array_equal(found["a"], array)
    assert found["scalar"].shape == () and found["scalar"] == array.flat[3]


def model():
    return Sequential(Linear(3, 4), ReLU(), Linear(4, 2))


CHANGES = {
    "missing": (lambda s: s.pop("2.bias"), "'2.bias': expected float32 of shape (2,), got no such name"),
    "unexpected": (lambda s: s.update(more=np.zeros(1)), "'more': expected no such name, got float64 of shape (1,)"),
    "shape": (
        lambda s: s.update({"0.weight": np.zeros((3, 4), np.float32)}),
        "'0.weight': expected float32 of shape (4, 3), got float32 of shape (3, 4)",
    ),
    "dtype": (
        lambda s: s.update({"0.weight": np.zeros((4, 3))}),
        "'0.weight': expected float32 of shape (4, 3), got float64 of shape (4, 3)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_models_weights_are_an_error_of_one_line_and_change_nothing(change, tmp_path):
    changed, message = CHANGES[change]
    target, path = model(), tmp_path / "weights"
    before, state = target.state_dict(), model().state_dict()
    changed(state)
    save(path, state)
    with pytest.raises(CheckpointError) as error:
        load_into(target, path)
    assert one_line(error) == f"weights {path}: {message}; load the file of such a model"
    assert_same(target.state_dict(), before)


def test_a_file_that_ends_anywhere_or_is_another_is_an_error_of_one_line(tmp_path):
    path = tmp_path / "weights"
    save(path, model())
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match="damaged or another one") as error:
            load(path)
        one_line(error)
    for content in (whole + b"more", b"\xff" * 64, b"PK\x03\x04" + bytes(60)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged or another one"):
            load(path)


def test_what_is_no_file_or_cannot_be_written_is_an_error_of_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="could not be read") as error:
        load(tmp_path / "none")
    one_line(error)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="could not be read"):
        load(tmp_path / "pipe")
    with pytest.raises(CheckpointWriteError, match="could not be written") as error:
        save(tmp_path, model())
    one_line(error)
    for values in (np.array(["text"]), np.array([object()])):
        with pytest.raises(ArgumentError) as error:
            save(tmp_path / "weights", {"a": values})
        one_line(error)
    assert not (tmp_path / "weights").exists()


def test_without_safetensors_the_error_says_what_to_install(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ArgumentError, match=r"pip install -e '.*\[safetensors\]'"):
        save(tmp_path / "weights", model())


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight"])
def test_a_file_may_have_one_name_of_a_parameter_that_layers_share(name, tmp_path):
    model, other = (GPT(5, 4, 1, 8, 2, seed=seed) for seed in (0, 1))
    state, path = model.state_dict(), tmp_path / "weights.safetensors"
    assert_same({name: state[name]}, {name: state["lm_head.weight"]})
    save(path, {each: values for each, values in state.items() if each != name})
    load_into(other, path)
    assert_same(other.state_dict(), state)
    save(
        path,
        {each: values for each, values in state.items() if each not in ("transformer.wte.weight", "lm_head.weight")},
    )
    with pytest.raises(CheckpointError, match=r"expected float32 of shape .+, got no such name"):
        load_into(other, path)
