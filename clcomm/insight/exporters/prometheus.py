"""Prometheus: a port that it scrapes, and a file for node exporter's textfile collector."""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

from clcomm.base.storage.files import replacing
from clcomm.insight.exporters.figures import EPOCH, FIGURES, STEP, Figure, Labels, Point
from clcomm.insight.exporters.server import TextServer

#: The least time between two versions of the file, each of which takes some milliseconds.
FILE_EVERY_S = 5.0


class Prometheus:
    """This rank's figures as gauges.

    Args:
        port: where `/metrics` is served from a thread; None: nowhere.
        directory: that of node exporter's `--collector.textfile.directory`, which gets a file of the rank at each
            point; it stays when the run ends. None: no file.
        address: of this host, at which the port is; "0.0.0.0": all.

    Needs prometheus_client, the extra `prometheus`. Raises ArgumentError if the port is taken or the
    address is another's.
    """

    every_s = 1.0

    def __init__(
        self, labels: Labels, port: int | None = None, directory: str | os.PathLike[str] | None = None,
        address: str = "127.0.0.1",
    ):  # fmt: skip
        from prometheus_client import CollectorRegistry

        self._registry, self._labels = CollectorRegistry(), labels
        self._gauges: dict[str, Any] = {}
        self._file = None if directory is None else Path(directory) / f"clcomm-rank-{labels.rank}.prom"
        self._server: TextServer | None = None
        if directory is not None:
            self.every_s = FILE_EVERY_S
        if port is not None:
            got = f"got {address}:{port} for rank {labels.rank}"
            expected = f"--metrics-port: expected a free port for each rank of a host, {got}", "choose another"
            self._server = TextServer((address, port), self._answer, expected)
            self._server.serve()

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry).decode()

    def write(self, point: Point) -> None:
        for figure in FIGURES:
            if figure.tag in point.figures:
                self._gauge(figure).set(point.figures[figure.tag] * figure.scale)
        if point.kind != EPOCH:
            self._gauge(STEP).set(point.number)
        if self._file is not None:
            from prometheus_client import generate_latest

            with replacing(self._file) as file:
                file.write(generate_latest(self._registry))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _gauge(self, figure: Figure) -> Any:
        """Return a figure's gauge, made when it has its first value: none of 0 before that."""
        if figure.metric not in self._gauges:
            from prometheus_client import Gauge

            gauge = Gauge(figure.metric, figure.help, Labels._fields, registry=self._registry)
            self._gauges[figure.metric] = gauge.labels(*self._labels)
        return self._gauges[figure.metric]
