"""A page that is served to this user alone: on 127.0.0.1, at an address that nobody can guess."""

from __future__ import annotations

import hmac
import secrets
from http import HTTPStatus
from types import TracebackType

from clcomm.insight.exporters.server import TextServer


class PageServer(TextServer):
    """Serves `page`, which may be replaced at any time, from threads, until the `with` block ends.

    Other users of the host can connect too, so the address has a token of 128 random bits; without it there is no page.
    Raises ArgumentError if the port is taken.

    Args:
        port: 0: any that is free.

    Attributes:
        page: HTML.
    """

    def __init__(self, port: int):
        self.page = ""
        self._path = f"/{secrets.token_urlsafe(16)}/"
        expected = f"--serve: expected a free port, got {port}", "leave it out to have one chosen"
        super().__init__(("127.0.0.1", port), self._answer, expected)

    @property
    def address(self) -> str:
        """The page's address, for a browser."""
        return f"http://127.0.0.1:{self.server_port}{self._path}"

    def _answer(self, path: str) -> tuple[HTTPStatus, str, str]:
        if hmac.compare_digest(path.encode(errors="replace"), self._path.encode()):
            return HTTPStatus.OK, _HTML, self.page
        return HTTPStatus.FORBIDDEN, _HTML, _FORBIDDEN

    def __enter__(self) -> PageServer:
        self.serve()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_HTML = "text/html; charset=utf-8"
_FORBIDDEN = "<!DOCTYPE html><title>403</title>The address that clcomm printed has the page.\n"
