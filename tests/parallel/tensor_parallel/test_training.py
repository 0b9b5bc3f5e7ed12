"""Models divided by a plan train as on one rank: alone, beside data parallel, and with the sequence divided."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Mesh
from clcomm.engine import Dropout, Linear, Sequential, Tensor
from clcomm.engine.nn import manual_seed
from clcomm.parallel.tensor_parallel import ColumnParallel, SequenceParallel, parallelize_module
from tests.parallel.tensor_parallel.tasks import (
    GPTTask,
    MLPTask,
    close,
    device,
    loss_of,
    tensor_parallel,
    trained,
)

pytestmark = pytest.mark.mpi(min_size=1)


def test_ranks_that_compute_in_their_thread_and_others_start_the_same_sums(several, monkeypatch):
    """As on hosts of which one has a core a rank, and another has more."""
    monkeypatch.setattr(device(), "runs_in_caller", several.rank == several.size - 1)
    model = parallelize_module(MLPTask.model(), several, MLPTask.plans["whole"])
    trained(MLPTask, model, 1, MLPTask.loss(several))
    close(model.state_dict(), trained(MLPTask, MLPTask.model(), 1, loss_of(MLPTask)).state_dict())


def test_dropout_is_alike_on_tensor_parallel_ranks_and_differs_on_others(auto):
    size = tensor_parallel(auto)
    mesh = Mesh(auto, tp=size, dp=-1)
    model = Sequential(Dropout(0.5), Linear(8, 8 * size, device=device()), Dropout(0.5))
    parallelize_module(model, mesh["tp"], {"1": ColumnParallel(), "2": SequenceParallel()})
    for _ in range(2):
        manual_seed(5)
        ones = Tensor(np.ones((16, 64), np.float32), device())
        common, again, own = (model[n](ones).numpy() for n in (0, 0, 2))
        places = auto.all_gather_object((mesh.coordinates["dp"], common.tobytes(), own.tobytes()))
        groups = {dp: {masks for other, masks, _ in places if other == dp} for dp, *_ in places}
        assert all(len(masks) == 1 for masks in groups.values())  # alike within a group, another in each
        assert len(set.union(*groups.values())) == mesh.shape["dp"]
        assert len({mine for *_, mine in places}) == auto.size
        assert common.tobytes() != again.tobytes()
        assert common.tobytes() != own.tobytes() or size == 1
    mesh.close()


def test_stats_name_the_axis_and_what_moved(several):
    mesh = Mesh(several, tp=several.size)
    model = parallelize_module(GPTTask.model(), mesh["tp"], GPTTask.plans["part"])
    trained(GPTTask, model, 1, GPTTask.loss(mesh["tp"]), steps=2)
    table = str(several.stats.table())
    for line in ("reduce_scatter activations", "all_gather activations", "reduce_scatter input gradients",
                 "all_reduce parameter gradients"):  # fmt: skip
        assert f"{line} on tp" in table, table
    mesh.close()
