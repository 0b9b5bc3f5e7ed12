"""Weights & Biases, offline: a run in a directory, which `wandb sync` uploads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from clcomm.insight.exporters.figures import EPOCH, Point

PROJECT = "clcomm"


class WeightsAndBiases:
    """One run in a directory, which `wandb sync` uploads; needs the extra `wandb`.

    Args:
        directory: where the run is kept.
        settings: the run's options.
    """

    every_s = 2.0

    def __init__(self, directory: str | os.PathLike[str], settings: Mapping[str, Any]):
        import wandb

        os.makedirs(directory, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT, config=dict(settings), dir=os.path.abspath(directory), mode="offline",
            settings={"silent": True, "console": "off"},
        )  # fmt: skip
        self._step = 0

    def write(self, point: Point) -> None:
        # It counts on by one number; an epoch's own goes beside its figures.
        if point.kind != EPOCH:
            self._step = point.number
        about = {EPOCH: point.number} if point.kind == EPOCH else {}
        self._run.log({**about, **point.figures}, step=self._step)

    def close(self) -> None:
        self._run.finish()
