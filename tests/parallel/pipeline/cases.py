"""What the tests of pipelines share: models, batches, and the run of one rank that they have to equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clcomm.engine import CrossEntropyLoss, Generator, Linear, Module, ReLU, Sequential, Tanh, Tensor
from clcomm.optim import SGD
from clcomm.parallel import ColumnParallel, HeadsParallel, RowParallel
from models import GPT, ConvNet, ResNet
from models.gpt import next_token_loss
from tests.helpers import cpu_device

STEPS = 50
#: The bar: relative to the parameters of one rank.
CLOSE = 1e-4
VOCABULARY, CONTEXT, CLASSES = 20, 6, 5
#: How tensor-parallel ranks divide the GPT.
GPT_PLAN = {
    "transformer.h.*.attn": HeadsParallel("heads"),
    "transformer.h.*.attn.c_attn": ColumnParallel(sections=3),
    "transformer.h.*.mlp.c_fc": ColumnParallel(),
    "transformer.h.*.*.c_proj": RowParallel(),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A model, its batches, and its cuts into stages where the default one does not fit."""

    make: Callable[[], Module]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    loss: Callable[[Tensor, Tensor], Tensor]
    cuts: dict[int, list[int]]

    def batch_of(self, step: int, samples: int, replica: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return a data-parallel rank's samples of a step; any rank can compute all."""
        return self.batch(np.random.default_rng([step, replica]), samples)

    def cut(self, stages: int) -> list[int] | str:
        return self.cuts.get(stages, "layers")


def perceptron() -> Sequential:
    device, rng = cpu_device("cpu"), Generator(7)
    sizes = [6, 16, 12, 16, 12, 16, 12, 16, CLASSES]
    layers: list[Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        layers += [Linear(inputs, outputs, device=device, rng=rng), Tanh() if number % 2 else ReLU()]
    return Sequential(*layers[:-1])


def features(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((samples, 6)).astype(np.float32), rng.integers(0, CLASSES, samples).astype(np.int32)


def images(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    pixels = rng.standard_normal((samples, 1, 8, 8)).astype(np.float32)
    return pixels, rng.integers(0, CLASSES, samples).astype(np.int32)


def text(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = rng.integers(0, VOCABULARY, (samples, CONTEXT + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


CASES = {
    "mlp": Case(perceptron, features, CrossEntropyLoss(), {}),
    # 10 layers in 8 stages, of which some have none with parameters: flattening and pooling across ranks.
    "convnet": Case(lambda: ConvNet((1, 8, 8), CLASSES, device=cpu_device("cpu"), seed=2), images, CrossEntropyLoss(),
                    {8: [0, 1, 3, 5, 6, 7, 8, 9], 6: [0, 2, 3, 6, 7, 9]}),
    "gpt": Case(lambda: GPT(VOCABULARY, CONTEXT, 6, 12, 2, device=cpu_device("cpu"), seed=3), text, next_token_loss,
                {}),
}  # fmt: skip


def resnet() -> ResNet:
    return ResNet((1, 8, 8), CLASSES, (1, 1, 1, 1), 4, device=cpu_device("cpu"), seed=4)


def trained_alone(
    case: Case, samples: int, replicas: int = 1, steps: int = STEPS, parts: int = 1
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Return parameters and losses of one rank that trains on all replicas' samples, cut into `parts`."""
    model = case.make()
    optimizer, losses = SGD(model, 0.05, momentum=0.9), []
    for step in range(steps):
        found = []
        for replica in range(replicas):
            x, y = case.batch_of(step, samples, replica)
            for part in np.split(np.arange(samples), parts):
                loss = case.loss(model(tensor(x[part])), tensor(y[part]))
                loss.backward(1 / replicas / parts)
                found.append(loss.item())
        losses.append(float(np.mean(found)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses


def tensor(values: np.ndarray) -> Tensor:
    return Tensor(values, cpu_device("cpu"))


def require_close(state, expected) -> None:
    assert list(state) == list(expected)
    for name, values in state.items():
        norm = np.linalg.norm(expected[name].astype(np.float64))
        apart = np.linalg.norm(values.astype(np.float64) - expected[name])
        assert apart <= CLOSE * norm, f"{name}: {apart:.2e} apart, of {norm:.2e}"


def bits(state) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in state.items()}
