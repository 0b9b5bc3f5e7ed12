"""A page that is served to this user alone: on 127.0.0.1, at an address that nobody can guess."""

from __future__ import annotations

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from clcomm.errors import ArgumentError


class PageServer(ThreadingHTTPServer):
    """Serves `page`, which may be replaced at any time, from threads, until the `with` block ends.

    Other users of the host can connect too, so the address has a token of 128 random bits; without it there is no page.
    Raises ArgumentError if the port is taken.

    Args:
        port: 0: any that is free.

    Attributes:
        page: HTML.
    """

    daemon_threads = True

    def __init__(self, port: int):
        self.page = ""
        self._path = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ArgumentError(
                f"--serve: expected a free port, got {port}: {error.strerror}; leave it out to have one chosen"
            ) from None

    @property
    def address(self) -> str:
        """The page's address, for a browser."""
        return f"http://127.0.0.1:{self.server_port}{self._path}"

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """Return the answer for a path."""
        if hmac.compare_digest(path.encode(errors="replace"), self._path.encode()):
            return HTTPStatus.OK, self.page
        return HTTPStatus.FORBIDDEN, "<!DOCTYPE html><title>403</title>The address that clcomm printed has the page.\n"

    def __enter__(self) -> PageServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        status, text = self.server.answer(self.path)
        encoded = text.encode()
        self.send_response(status)
        for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(encoded))),
                            ("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *message: object) -> None:
        """Print nothing: the terminal is the command's."""
