"""The layers that models offer to pipelines compute what the models do, and keep their names."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.engine import Tensor
from clcomm.parallel.pipeline.plan import layers_of
from clcomm.parallel.pipeline.stage import ModelPart, run_layers
from models import GPT, MLP, ConvNet, LeNet, ResNet
from tests.helpers import cpu_device

IMAGE = (2, 12, 12)
MODELS = {
    "mlp": lambda device: MLP(IMAGE, 5, 16, device=device, seed=0),
    "convnet": lambda device: ConvNet(IMAGE, 5, device=device, seed=0),
    "lenet": lambda device: LeNet(IMAGE, 5, device=device, seed=0),
    "resnet": lambda device: ResNet(IMAGE, 5, (1, 2, 1, 1), 4, device=device, seed=0),
    "gpt": lambda device: GPT(9, 7, 2, 8, 2, device=device, seed=0),
    "gpt, head of its own": lambda device: GPT(9, 7, 2, 8, 2, tied=False, device=device, seed=0),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_one_after_another_are_the_model(name):
    device, rng = cpu_device("cpu"), np.random.default_rng(0)
    model = MODELS[name](device)
    is_text = name.startswith("gpt")
    x = rng.integers(0, 9, (3, 7)).astype(np.int32) if is_text else rng.standard_normal((3, *IMAGE)).astype(np.float32)
    layers = layers_of(model)
    assert np.array_equal(run_layers(layers, Tensor(x, device)).numpy(), model(Tensor(x, device)).numpy())
    whole = ModelPart(model, layers)
    assert {n: id(p) for n, p in whole.named_parameters()} == {n: id(p) for n, p in model.named_parameters()}
    assert {n: id(b) for n, b in whole.named_buffers()} == {n: id(b) for n, b in model.named_buffers()}
    for cut in range(1, len(layers)):
        halves = [ModelPart(model, part) for part in (layers[:cut], layers[cut:])]
        names = [set(each._state()) for each in halves]
        tied = {"transformer.wte.weight"} if name == "gpt" else set()
        assert names[0] | names[1] == set(model._state()) - ({"lm_head.weight"} if tied else set())
        assert names[0] & names[1] == tied
        halves[1].eval()
        assert all(module.training for _, module in halves[0].named_modules())
        assert not any(module.training for _, module in halves[1].named_modules())
        halves[1].train()
