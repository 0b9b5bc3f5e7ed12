"""Every way to divide training between ranks, and their combinations, train as one rank on the same samples.

A case's network, mesh, stage of ZeRO, micro-batches and settings are drawn by its number and the number of ranks.
`make combinations` runs all cases, on 2, 3, 4 and 8 ranks.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.distributed_optimizer import DistributedOptimizer
from clcomm.engine import Module
from clcomm.optim import SGD
from clcomm.parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    SequenceParallel,
    SyncBatchNorm,
    VocabularyParallel,
    parallelize_module,
)
from clcomm.parallel.pipeline import Pipeline
from clcomm.schedules.pipeline import INTERLEAVED, SCHEDULES
from tests.parallel.pipeline.cases import CASES, STEPS, bits, images, require_close, resnet, tensor
from tests.parallel.pipeline.cases import Case as Network
from tests.parallel.pipeline.test_divided_stages import PLANS

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(600)]

NETWORKS = {**CASES, "resnet": Network(resnet, images, CASES["convnet"].loss, {})}
#: Layers of the perceptron that a stage begins with: a column-parallel layer and the row-parallel one behind it stay
#: together.
_PAIRS = [0, 4, 8, 12]
#: Batch norm over few samples makes small differences grow, the more the longer the steps are.
_LR = {"resnet": 1e-4}
#: Where they still pass CLOSE, so many runs of one rank whose initial weights have other last bits tell how far
#: rounding alone takes a network; ranks may be so many times as far.
_ROUNDED, _TIMES_ROUNDING = 4, 2
#: The samples of a micro-batch.
_SAMPLES = {"resnet": 4}


class Case(NamedTuple):
    """A network and how ranks divide its training; `zero` is the stage of ZeRO, `parts` the micro-batches."""

    network: str
    dp: int
    tp: int
    pp: int
    zero: int
    parts: int
    schedule: str
    sequence: bool
    overlap: bool | str

    @property
    def samples(self) -> int:
        """Of a micro-batch."""
        return _SAMPLES.get(self.network, 2)

    @property
    def network_of(self) -> Network:
        return NETWORKS[self.network]


def drawn(number: int, ranks: int) -> Case:
    """Return a case of `ranks` ranks; networks take turns, and with each network the meshes that it fits."""
    rng = random.Random(900_000 + 1000 * ranks + number)
    network = list(NETWORKS)[number % len(NETWORKS)]
    meshes = [mesh for mesh in _meshes(ranks) if _fits(network, *mesh)]
    dp, tp, pp = meshes[number // len(NETWORKS) % len(meshes)]
    zero = (number + number // len(NETWORKS)) % (4 if pp == 1 else 2)
    schedule = rng.choice(SCHEDULES if 2 * pp <= 4 or network == "gpt" else SCHEDULES[:2])
    parts = rng.choice([pp, 2 * pp]) if pp > 1 else rng.choice([1, 3, 3])
    return Case(
        network, dp, tp, pp, zero, parts, schedule, sequence=tp > 1 and pp == 1 and rng.random() < 0.5,
        overlap=False if zero else rng.choice([False, True, "auto"]),
    )  # fmt: skip


def _meshes(ranks: int) -> list[tuple[int, int, int]]:
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [(dp, tp, pp) for dp in sizes for tp in sizes for pp in sizes if dp * tp * pp == ranks]


def _fits(network: str, dp: int, tp: int, pp: int) -> bool:
    """Return whether a network can be divided so: heads are two, and some have few layers."""
    stages = {"mlp": 4, "gpt": 6, "convnet": 4, "resnet": 7}[network]
    return pp <= stages and (tp == 1 or (tp == 2 and network in PLANS)) and (network != "resnet" or dp <= 4)


def samples(case: Case, step: int, replica: int) -> tuple[np.ndarray, np.ndarray]:
    return case.network_of.batch_of(step, case.parts * case.samples, replica)


def trained_alone(case: Case, rounded: int = 0) -> dict[str, np.ndarray]:
    """Return what one rank has after the same steps, each micro-batch with all replicas' samples.

    rounded: 0, or the seed that draws the last bit of each initial weight anew.
    """
    network = case.network_of
    model = network.make()
    if rounded:
        rng = np.random.default_rng(99 + rounded)
        for parameter in model.parameters():
            values = parameter.numpy()
            parameter.copy_from(np.nextafter(values, values + rng.integers(-1, 2, values.shape).astype(np.float32)))
    optimizer = SGD(model, _LR.get(case.network, 0.05), momentum=0.9)
    for step in range(STEPS):
        every = [samples(case, step, replica) for replica in range(case.dp)]
        for part in np.split(np.arange(case.parts * case.samples), case.parts):
            x, y = (np.concatenate([arrays[kind][part] for arrays in every]) for kind in (0, 1))
            network.loss(model(tensor(x)), tensor(y)).backward(1 / case.parts)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def require_equal_training(case: Case, state: dict[str, np.ndarray]) -> None:
    """Raise AssertionError unless a state is within CLOSE of one rank's, or as near as rounding lets it be."""
    expected = trained_alone(case)
    try:
        require_close(state, expected)
    except AssertionError as error:
        if case.network not in _LR:
            raise AssertionError(f"{case}: {error}") from None
        others = [trained_alone(case, rounded=seed) for seed in range(1, _ROUNDED + 1)]
        rounding = max(apart(other, expected) for other in others)
        found = apart(state, expected)
        assert found <= _TIMES_ROUNDING * rounding, f"{case}: {found:.1e} apart, rounding alone {rounding:.1e}: {error}"


def apart(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Return how far apart the tensor is that is farthest, relative to its norm."""
    pairs = [(state[name].astype(np.float64), each.astype(np.float64)) for name, each in expected.items()]
    return max(np.linalg.norm(own - each) / np.linalg.norm(each) for own, each in pairs if each.any())


def plan_of(case: Case) -> dict[str, Any]:
    if not case.sequence or case.network != "gpt":
        return PLANS[case.network]
    return {
        "transformer.wte": VocabularyParallel(),
        "transformer.h": SequenceParallel(split_input=True),
        "transformer.h.*.attn": HeadsParallel("heads"),
        "transformer.h.*.attn.c_attn": ColumnParallel(sections=3, sequence_axis=-2),
        "transformer.h.*.mlp.c_fc": ColumnParallel(sequence_axis=-2),
        "transformer.h.*.*.c_proj": RowParallel(sequence_axis=-2),
        "transformer.ln_f": SequenceParallel(),
        "lm_head": ColumnParallel(sequence_axis=-2, gather_output=True),
    }


class Job:
    """A case on this rank."""

    def __init__(self, case: Case, comm: Communicator):
        self.case, self.mesh = case, Mesh(comm, dp=case.dp, tp=case.tp, pp=case.pp)
        model: Module = case.network_of.make()
        if case.network == "resnet" and case.dp > 1:
            model = SyncBatchNorm.convert_sync_batchnorm(model, self.mesh["dp"])
        if case.tp > 1:
            model = parallelize_module(model, self.mesh["tp"], plan_of(case))
        self.pipeline = self._pipeline(model) if case.pp > 1 else None
        trained = model if self.pipeline is None else self.pipeline.module
        self.ddp = DistributedDataParallel(
            trained, self.mesh["dp"], bucket_size=2000, overlap_grad_reduce=case.overlap, zero=case.zero
        )
        optimizer = SGD(trained, _LR.get(case.network, 0.05), momentum=0.9)
        self.optimizer = DistributedOptimizer(optimizer, self.ddp.synchronizer) if case.zero else optimizer
        if case.zero > 1:
            self.ddp.synchronizer.broadcast_parameters(trained)

    def _pipeline(self, model: Module) -> Pipeline:
        case = self.case
        stages = case.pp * (2 if case.schedule == INTERLEAVED else 1)
        cut = (
            _PAIRS[:: 4 // stages]
            if case.network == "mlp" and case.tp > 1 and stages <= 4
            else (case.network_of.cut(stages))
        )
        return Pipeline(
            model, self.mesh["pp"], loss=case.network_of.loss, micro_batches=case.parts, schedule=case.schedule, cut=cut
        )

    def step(self, number: int) -> None:
        x, y = samples(self.case, number, self.mesh["dp"].rank)
        if self.pipeline is not None:
            self.pipeline.step(x, y, self.ddp if self.case.overlap else None)
            self.ddp.finish_grad_sync()
        else:
            for part in np.split(np.arange(len(x)), self.case.parts):
                is_last = part[-1] == len(x) - 1
                if is_last:
                    self._backward(x[part], y[part])
                else:
                    with self.ddp.no_sync():
                        self._backward(x[part], y[part])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _backward(self, x: np.ndarray, y: np.ndarray) -> None:
        self.case.network_of.loss(self.ddp(tensor(x)), tensor(y)).backward(1 / self.case.parts)
        self.ddp.finish_grad_sync()

    def state(self) -> dict[str, np.ndarray]:
        with self.ddp.synchronizer.full_parameters(self.ddp.module):
            return (self.ddp if self.pipeline is None else self.pipeline).state_dict()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("number", range(40))
def test_ranks_train_as_one_on_the_same_samples(auto, number):
    case = drawn(number, auto.size)
    job = Job(case, auto)
    for step in range(STEPS):
        job.step(step)
    state = job.state()
    require_equal_training(case, state)
    assert all(theirs == bits(state) for theirs in auto.all_gather_object(bits(state))), case
    job.mesh.close()


@pytest.mark.mpi(min_size=1)
def test_every_combination_is_drawn():
    """Of the strategies in pairs, on 4 and 8 ranks, with every network that they divide."""
    for ranks in (4, 8):
        cases = [drawn(number, ranks) for number in range(40)]
        assert all(math.prod((case.dp, case.tp, case.pp)) == ranks for case in cases)
        for network in NETWORKS:
            own = [case for case in cases if case.network == network]
            assert any(case.dp > 1 and case.pp > 1 for case in own)
            if network in PLANS:
                assert any(case.dp > 1 and case.tp > 1 for case in own) and any(case.tp > 1 < case.pp for case in own)
        assert {case.zero for case in cases if case.parts > 1 == case.pp} == {0, 1, 2, 3}
        assert any(case.sequence and case.network == "gpt" for case in cases)
