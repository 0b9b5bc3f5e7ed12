"""Trackers of experiments with the calls of Weights & Biases: its own package offline, and trackio."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from clcomm.exporters.figures import EPOCH, Point

#: What each tracker's `init` takes to keep a run in a directory and reach no server.
OFFLINE: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline", "settings": {"silent": True, "console": "off"}},
    "trackio": {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
}
PROJECT = "clcomm"


class Tracker:
    """One run in a directory, which the tracker's own commands show or upload: `wandb sync`, `trackio show`.

    Args:
        module: "wandb" or "trackio".
        directory: where the run is kept.
        settings: the run's options.

    Needs the extra of the module's name.
    """

    every_s = 2.0

    def __init__(self, module: str, directory: str | os.PathLike[str], settings: Mapping[str, Any]):
        directory = os.path.abspath(directory)
        os.makedirs(directory, exist_ok=True)
        if module == "trackio":
            os.environ["TRACKIO_DIR"] = directory  # read when it is imported
        where = {"dir": directory} if module == "wandb" else {}
        with redirect_stdout(io.StringIO()):  # trackio advertises its commands; a run's output is the run's
            self._run = import_module(module).init(project=PROJECT, config=dict(settings), **where, **OFFLINE[module])
        self._step = 0

    def write(self, point: Point) -> None:
        # Both count on by one number; an epoch's own goes beside its figures.
        if point.kind != EPOCH:
            self._step = point.number
        about = {EPOCH: point.number} if point.kind == EPOCH else {}
        self._run.log({**about, **point.figures}, step=self._step)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
