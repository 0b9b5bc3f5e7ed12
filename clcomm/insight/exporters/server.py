"""A server of texts over HTTP that takes little of its process, whoever connects: few connections, none for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from clcomm.base.errors import ArgumentError

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
