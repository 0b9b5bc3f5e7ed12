"""Models, plans, batches and losses that tensor-parallel ranks train, and one rank beside them."""

from __future__ import annotations

import numpy as np

from clcomm.engine import CrossEntropyLoss, Linear, ReLU, Sequential, Tensor
from clcomm.engine.nn import Module
from clcomm.optim import SGD
from clcomm.parallel.tensor_parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    VocabularyParallel,
    VocabularyParallelCrossEntropyLoss,
)
from models.gpt import GPT, next_token_loss
from tests.helpers import cpu_device

#: The bar: relative to the parameters of one rank.
STEPS, CLOSE = 50, 1e-4
#: All but the number of features are multiples of 1 to 4 ranks, and of 8.
VOCABULARY, TOKENS, WIDTH, HEADS, HIDDEN, CLASSES = 48, 24, 48, 24, 48, 24
FEATURES, BATCH = 6, 3


def device():
    return cpu_device("cpu")


def drawn(*seed: int):
    return np.random.default_rng(seed)


def close(state, expected) -> None:
    assert state.keys() == expected.keys()
    for name, values in state.items():
        assert values.shape == expected[name].shape
        norm = np.linalg.norm(expected[name].astype(np.float64))
        assert np.linalg.norm(values.astype(np.float64) - expected[name]) <= CLOSE * norm, name


def tensor_parallel(comm) -> int:
    """Return how many ranks divide a model: with 4, and with 8, there are two groups of them."""
    return max(2, comm.size // 2) if comm.size % 2 == 0 else comm.size


def alike(comm, arrays) -> bool:
    return len(set(comm.all_gather_object([each.tobytes() for each in arrays].__repr__()))) == 1


class MLPTask:
    """A multilayer perceptron, divided in two ways beside each other."""

    plans = {  # noqa: RUF012
        "whole": {"0": ColumnParallel(), "2": RowParallel(), "4": ColumnParallel(gather_output=True)},
        "part": {"2": RowParallel(split_input=True), "4": ColumnParallel(gather_output=True)},
    }

    @staticmethod
    def model(seed: int = 0) -> Module:
        rng = drawn(seed)
        model = Sequential(
            Linear(FEATURES, HIDDEN, device=device()), ReLU(), Linear(HIDDEN, 24, device=device()), ReLU(),
            Linear(24, CLASSES, device=device()),
        )  # fmt: skip
        for parameter in model.parameters():
            parameter.copy_from(rng.standard_normal(parameter.shape).astype(np.float32) * 0.3)
        return model

    @staticmethod
    def batch(rank: int, step: int):
        rng = drawn(rank, step)
        return rng.standard_normal((BATCH, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, BATCH).astype(
            np.int32
        )

    @staticmethod
    def loss(comm):
        return CrossEntropyLoss()


class GPTTask:
    """A GPT with the sequence divided or not, the head tied to the embedding or not."""

    plans = {"whole": {}, "part": {}}  # noqa: RUF012

    @staticmethod
    def plan(sequence: bool) -> dict:
        axis = -2 if sequence else None
        plan = {
            "transformer.wte": VocabularyParallel(),
            "transformer.h.*.attn": HeadsParallel("heads"),
            "transformer.h.*.attn.c_attn": ColumnParallel(sections=3, sequence_axis=axis),
            "transformer.h.*.mlp.c_fc": ColumnParallel(sequence_axis=axis),
            "transformer.h.*.*.c_proj": RowParallel(sequence_axis=axis),
            "lm_head": ColumnParallel(sequence_axis=axis),
        }
        if sequence:
            plan |= {"transformer.h": SequenceParallel(split_input=True), "transformer.ln_f": SequenceParallel()}
        return plan

    @staticmethod
    def model(seed: int = 0, tied: bool = True) -> Module:
        return GPT(VOCABULARY, TOKENS, 2, WIDTH, HEADS, tied=tied, device=device(), seed=seed)

    @staticmethod
    def batch(rank: int, step: int):
        tokens = drawn(rank, step).integers(0, VOCABULARY, (BATCH, TOKENS + 1)).astype(np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()

    @staticmethod
    def loss(comm):
        return VocabularyParallelCrossEntropyLoss(comm)


GPTTask.plans = {"whole": GPTTask.plan(False), "part": GPTTask.plan(True)}


def joined(task, ranks: int, step: int):
    return [np.concatenate(each) for each in zip(*(task.batch(rank, step) for rank in range(ranks)), strict=True)]


def trained(task, model, ranks: int, loss_fn, make=SGD, steps: int = STEPS) -> Module:
    """Train on the samples of some data-parallel ranks together."""
    optimizer = optimizer_of(make, model)
    for step in range(steps):
        x, targets = (Tensor(each, device()) for each in joined(task, ranks, step))
        loss_fn(model(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def optimizer_of(make, parameters):
    if make is SGD:
        return SGD(parameters, 0.1, momentum=0.9)
    # The keys' biases have gradients of 0 but for rounding, which a smaller eps would scale up to the learning rate.
    return make(parameters, 1e-3, eps=1e-5)


def loss_of(task):
    return next_token_loss if task is GPTTask else CrossEntropyLoss()
