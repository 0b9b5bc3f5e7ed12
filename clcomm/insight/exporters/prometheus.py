"""Prometheus: a port that it scrapes, and a file for node exporter's textfile collector."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import replacing
from clcomm.insight.exporters.figures import EPOCH, FIGURES, STEP, Figure, Labels, Point

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


# --- A server of texts over HTTP that takes little of its process: few connections, none for long. ---

#: The most connections at a time; one more ends the oldest. How long one may be silent, in seconds.
MOST_CONNECTIONS, SILENT_S = 16, 5.0
#: The pause after a connection that could not be accepted, as no descriptor is free.
_PAUSE_S = 0.2

#: Returns the status, the content's type and the text for a path.
Answer = Callable[[str], tuple[HTTPStatus, str, str]]


class TextServer(ThreadingHTTPServer):
    """Serves from threads, from `serve` to `close`.

    Args:
        place: the address and the port to listen at; port 0: any that is free.
        answer: what is served.
        expected: the beginning of the error, and its end, for a place that is taken or not this host's.

    Raises ArgumentError for such a place.
    """

    daemon_threads = True

    def __init__(self, place: tuple[str, int], answer: Answer, expected: tuple[str, str]):
        self.answer = answer
        self._open: list[Any] = []
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        try:
            super().__init__(place, _Handler)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", "") or str(error)
            raise ArgumentError(f"{expected[0]}: {reason}; {expected[1]}") from None

    def serve(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    # --- of socketserver's classes ---

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks for the host's name, which may take seconds
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with suppress(OSError, IndexError):  # it ends at this moment
                self._open[0].shutdown(socket.SHUT_RDWR)
            if not self._room.acquire(timeout=SILENT_S):
                raise TimeoutError
        self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        if request in self._open:
            self._open.remove(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: that a client is gone is its affair."""


class _Handler(BaseHTTPRequestHandler):
    server: TextServer
    timeout = SILENT_S

    def do_GET(self) -> None:
        status, kind, text = self.server.answer(self.path)
        encoded = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(encoded))),
                            ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *message: object) -> None:
        """Print nothing: the terminal is the command's, or the training's."""
