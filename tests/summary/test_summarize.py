"""Model summaries: shapes and arithmetic by formula and by PyTorch, buckets and order as the plan has them."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import cut
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.engine import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential, Tensor
from clcomm.insight.summary import Summary, summarize
from models import MLP, ConvNet
from tests.numpy_models import small_model


def by_name(summary: Summary) -> dict[str, tuple[object, ...]]:
    return {each.name: (each.output_shape, each.forward_flops, each.training_flops) for each in summary.layers}


def shown(summary: Summary) -> list[str]:
    """Return the lines of the table on a terminal of 80 columns."""
    console = Console(width=80, file=io.StringIO())
    console.print(summary.table())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# Few images make a convolution a matrix product, which pooling follows as a layer of its own.
@pytest.mark.parametrize(("images", "shape"), [(3, (32, 14, 14)), (16, (32, 7, 7))])
def test_the_convnet_by_its_formulas(images: int, shape: tuple[int, ...]) -> None:
    model = ConvNet(seed=0)
    summary = summarize(model, (images, 1, 28, 28))
    conv1, conv2, fc1, fc2 = 2 * 28 * 28 * 16 * 9, 2 * 14 * 14 * 32 * 16 * 9, 2 * 1568 * 128, 2 * 128 * 10
    found = by_name(summary)
    assert found["conv1"][1:] == (conv1, 2 * conv1)  # nobody needs the images' gradient
    assert found["conv2"] == (shape, conv2, 3 * conv2)
    assert found["fc1"] == ((128,), fc1, 3 * fc1)
    assert found["fc2"] == ((10,), fc2, 3 * fc2)
    assert summary.flops(training=False) == conv1 + conv2 + fc1 + fc2
    assert summary.parameter_count == 206_922
    assert [name for layer in summary.layers for name in layer.parameters] == list(model.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("frozen", [(), ("conv1.weight", "conv1.bias"), ("fc2.weight",)])
def test_the_arithmetic_is_what_pytorch_counts(frozen: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    from training.engines.torch_engine import make_module

    ours, theirs = ConvNet(seed=0), make_module("convnet", (1, 28, 28), 10, 0)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name not in frozen
    first, second = summarize(ours, (2, 1, 28, 28)), summarize(theirs, (2, 1, 28, 28))
    for name in ("conv1", "conv2", "fc1", "fc2"):
        assert by_name(first)[name][1:] == by_name(second)[name][1:], name
    assert first.parameters == second.parameters
    assert by_name(second)["conv2"][0] == (32, 14, 14)


def test_pytorch_modules_keep_their_state() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Dropout(), torch.nn.ReLU())
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    summary = summarize(model, (4, 1, 6, 6))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [layer.kind for layer in summary.layers] == ["Conv2d", "BatchNorm2d", "Dropout", "ReLU"]
    assert summary.layers[0].output_shape == (2, 4, 4)
    assert not model[0]._forward_hooks


def test_layers_of_a_sequence() -> None:
    model = Sequential(Conv2d(1, 4, 3, stride=2), ReLU(), MaxPool2d(2), Flatten(), Linear(4, 6), ReLU(), Linear(6, 2))
    layers = summarize(model, (5, 1, 6, 6)).layers
    assert [(layer.name, layer.output_shape) for layer in layers if layer.parameters] == [
        ("0", (4, 2, 2)), ("4", (6,)), ("6", (2,)),
    ]  # fmt: skip
    assert [layer.kind for layer in layers if layer.name == "4"] == ["Linear+ReLU"]
    assert layers[0].forward_flops == 2 * 4 * 9 * 2 * 2


def test_a_shared_parameter_counts_once_and_an_unused_one_is_told() -> None:
    class Twice(Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.spare = Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    layers = summarize(Twice(), (1, 3)).layers
    assert [layer.parameters for layer in layers] == [("weight", "bias"), (), ("spare.weight",)]
    assert layers[-1].kind == "not used"
    assert [layer.training_flops for layer in layers] == [2 * 18, 3 * 18, 0]


@pytest.mark.parametrize("bucket_size", [None, 1, 1 << 16, 1 << 30])
def test_buckets_are_those_of_the_plan(bucket_size: int | None) -> None:
    model = MLP(seed=0)
    comm = Communicator(transport="solo", use_bucketing=bucket_size is not None, bucket_size=bucket_size or 1)
    sync = Synchronizer(comm)
    sync.broadcast_parameters(model)
    plan = sync.bucket_plan(model)
    places = {place.name: place for place in summarize(model, (1, 1, 28, 28), plan).parameters}
    for bucket in plan:
        for place in bucket.ranges:
            assert places[place.name].buckets == (bucket.index,)
    assert [place.ready for place in places.values()] == [6, 5, 4, 3, 2, 1]  # the last layer first


def test_the_order_that_was_seen_comes_first_and_split_tensors_are_in_several_buckets() -> None:
    model = MLP(seed=0)
    plan = cut(FlatLayout(model.flat_space().layout.specs).ranges, 1 << 16, split_grain=512)
    order = ["fc3.weight", "fc3.bias", "fc2.weight"]
    places = {place.name: place for place in summarize(model, (1, 1, 28, 28), plan, order).parameters}
    assert [places[name].ready for name in order] == [1, 2, 3]
    assert sorted(place.ready for place in places.values()) == [1, 2, 3, 4, 5, 6]
    assert places["fc1.weight"].buckets == tuple(b.index for b in plan if any(s.name == "fc1.weight" for s in b.ranges))
    assert len(places["fc1.weight"].buckets) > 1


def test_of_other_models_the_parameters_are_known() -> None:
    summary = summarize(small_model(), (1, 4))
    assert summary.flops(training=True) is None
    assert summary.parameter_count == 5 * 7 + 7 + 7 * 300
    below = "2,142 trained parameters layers' shapes and MFLOP are known for clcomm's and PyTorch's models only"
    assert " ".join(shown(summary)).endswith(below)


@pytest.mark.parametrize("shape", [(), (0, 1, 28, 28), (1, 3, 28, 28), (28, 28)])
def test_an_input_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        summarize(ConvNet(seed=0), shape)


@pytest.mark.parametrize("model", [ConvNet(seed=0), MLP(seed=0)], ids=["convnet", "mlp"])
def test_the_table_fits_80_columns_and_the_dict_is_json(model: object) -> None:
    summary = summarize(model, (1, 1, 28, 28))
    lines = shown(summary)
    assert not any("…" in line for line in lines)
    assert f"{summary.parameter_count:,} trained parameters" in lines[-2]
    assert "MFLOP a sample" in lines[-1]
    document = json.loads(json.dumps(summary.as_dict()))
    assert [each["name"] for each in document["parameters"]] == list(model.state_dict())  # type: ignore[attr-defined]
    assert np.sum([each["training_flops"] for each in document["layers"]]) == summary.flops(training=True)
