"""A report of a job on a mesh: gradients on its data-parallel axis are gradients, and every axis is named."""

from __future__ import annotations

import re

import numpy as np
import pytest

from clcomm import Mesh, Synchronizer
from clcomm.insight.report.record import gather_records, run_document, write_document
from clcomm.tools import cli
from tests.numpy_models import Model

pytestmark = pytest.mark.mpi(min_size=1)
STEPS = 4


def test_the_report_names_the_axes(auto, tmp_path, capsys, monkeypatch):
    mesh = Mesh(auto, dp=-1, tp=2 if auto.size % 2 == 0 else 1)
    model, sync = Model([("w", np.zeros(100))]), Synchronizer(mesh["dp"])
    sync.broadcast_parameters(model)
    for _ in range(STEPS):
        with auto.phase("step"):
            model["w"].grad = np.ones(100)
            sync.sync_gradients(model)
            mesh["tp"].all_reduce(np.ones(30), label="activations")
    document = run_document(gather_records(auto, steps=STEPS, training_s=1.0), steps=STEPS)
    path = auto.broadcast_object(str(tmp_path / "run.json"))
    write_document(path, document, auto, "--report")
    auto.barrier()
    if auto.rank:
        return
    monkeypatch.setenv("COLUMNS", "300")
    capsys.readouterr()
    cli.main(["report", path])
    shown = capsys.readouterr().out
    assert re.search(rf"all_reduce +gradients on dp +{STEPS} ", shown)
    assert re.search(rf"all_reduce +activations on tp +{STEPS} ", shown)
    assert re.search(rf"Total all-reduce calls +{STEPS}$", shown, re.MULTILINE)
    assert "No gradients were reduced" not in shown
    rows = {(row["label"], row["part"]): row for row in document["communication"]["operations"]}
    assert rows["gradients", "dp"]["bytes"] == STEPS * 800 and rows["activations", "tp"]["bytes"] == STEPS * 240
    for name, (label, operation) in {"dp": ("gradients", "all_reduce"), "tp": ("activations", "all_reduce")}.items():
        row, size = rows[label, name], mesh.shape[name]
        assert row["operation"] == operation
        if size == 1:
            assert row["busbw_bytes_per_s"] is None
        else:
            assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"] * 2 * (size - 1) / size)
