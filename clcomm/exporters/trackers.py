"""Trackers of experiments: Weights & Biases offline, trackio, which has the same calls, and MLflow's files."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
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


class Mlflow:
    """One run in MLflow's files in a directory, which `mlflow server --backend-store-uri` shows.

    Args:
        directory: where runs are kept, each in a folder of its own.
        settings: the run's options, which become parameters.

    Needs mlflow or mlflow-skinny, the extra `mlflow`. Raises OSError if the directory can't be written.
    """

    every_s = 2.0

    def __init__(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]):
        # MLflow 3 keeps runs in files only where this asks for it; its databases need more than mlflow-skinny brings.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        place = Path(directory).absolute()
        place.mkdir(parents=True, exist_ok=True)
        self._metric, self._client = Metric, MlflowClient(place.as_uri())
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        self._run = self._client.create_run(experiment).info.run_id
        self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in settings.items()])

    def write(self, point: Point) -> None:
        at = int(point.ended_s * 1e3)
        metrics = [self._metric(tag, value, at, point.number) for tag, value in point.figures.items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
