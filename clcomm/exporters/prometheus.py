"""Prometheus: a port that it scrapes, and a file for node exporter's textfile collector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from clcomm.errors import ArgumentError
from clcomm.exporters.figures import EPOCH, FIGURES, STEP, Figure, Labels, Point
from clcomm.storage.files import replacing

#: The least time between two versions of the file, each of which takes some milliseconds.
FILE_EVERY_S = 5.0


class Prometheus:
    """This rank's figures as gauges.

    Args:
        port: where `/metrics` is served from a thread, on all of the host's addresses; None: nowhere.
        directory: that of node exporter's `--collector.textfile.directory`, which gets a file of the rank at each
            point; it stays when the run ends. None: no file.

    Needs prometheus_client, the extra `prometheus`. Raises ArgumentError if the port is taken.
    """

    every_s = 1.0

    def __init__(self, labels: Labels, port: int | None = None, directory: str | os.PathLike[str] | None = None):
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._labels = CollectorRegistry(), labels
        self._gauges: dict[str, Any] = {}
        self._file = None if directory is None else Path(directory) / f"clcomm-rank-{labels.rank}.prom"
        self._server: Any = None
        if directory is not None:
            self.every_s = FILE_EVERY_S
        if port is not None:
            try:
                self._server, self._thread = start_http_server(port, registry=self._registry)
            except OSError as error:
                raise ArgumentError(
                    f"--metrics-port: expected a free port for each rank of a host, got {port} for rank "
                    f"{labels.rank}: {error.strerror}; choose another"
                ) from None

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
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _gauge(self, figure: Figure) -> Any:
        """Return a figure's gauge, made when it has its first value: none of 0 before that."""
        if figure.metric not in self._gauges:
            from prometheus_client import Gauge

            gauge = Gauge(figure.metric, figure.help, Labels._fields, registry=self._registry)
            self._gauges[figure.metric] = gauge.labels(*self._labels)
        return self._gauges[figure.metric]
