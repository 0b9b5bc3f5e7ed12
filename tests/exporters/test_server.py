"""The ports of a training and of a running job's page, when those who connect are many, silent, slow or gone."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.insight.exporters import prometheus as module
from clcomm.insight.exporters.prometheus import MOST_CONNECTIONS, TextServer
from tests.faults.launch import clean_environment
from tests.helpers import one_line

#: Serves one of the ports with few descriptors, prints its address, and at a line whether files can still be opened.
SERVES = """
import resource, sys
from clcomm.insight.exporters.figures import STEPS, Labels, Point

if sys.argv[1] == "page":
    from clcomm.insight.report.live import PageServer
    server = PageServer(0)
    server.page, address = "clcomm_step", server.address
    server.serve()
else:
    from clcomm.insight.exporters.prometheus import Prometheus
    exporter = Prometheus(Labels(0, "host", "dp=0"), 0)
    exporter.write(Point(STEPS, 7, {}, 0, 1))
    address = f"http://127.0.0.1:{exporter._server.server_port}/metrics"
from clcomm.comm.watch.status_page import StatusPage
page = StatusPage.alone(0)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
print(address, flush=True)
for line in sys.stdin:
    files = [open("/dev/null") for _ in range(16)]
    for file in files:
        file.close()
    print(page.read()[0].state, flush=True)
"""
EXPECTED = "--port: expected a free port, got 1", "choose another"


@contextmanager
def serving(kind: str) -> Iterator[tuple[str, subprocess.Popen]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=clean_environment(),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


def place_of(address: str) -> tuple[str, int]:
    host, _, port = address.split("/")[2].partition(":")
    return host, int(port)


def flood(address: str, connections: int) -> list[socket.socket]:
    """Connect, and send nothing, half a request, or a reset."""
    kept = []
    for number in range(connections):
        one = socket.create_connection(place_of(address), timeout=60)
        if number % 3:
            one.sendall(b"GET /metr" if number % 3 == 1 else b"\x00\x1b\xff\r\n")
        if number % 5 == 4:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        else:
            kept.append(one)
    return kept


@pytest.mark.parametrize("kind", ["page", "metrics"])
def test_many_connections_take_no_descriptor_from_the_process(kind: str) -> None:
    if kind == "metrics":
        pytest.importorskip("prometheus_client", reason="pip install 'clcomm[prometheus]'")
    with serving(kind) as (address, process):
        kept = flood(address, 90)
        for _ in range(3):
            assert b"clcomm_step" in urllib.request.urlopen(address, timeout=60).read()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("look\n")
            process.stdin.flush()
            assert process.stdout.readline() == "running\n"
            kept += flood(address, 20)
        for one in kept:
            one.close()
        assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


@contextmanager
def hello() -> Iterator[TextServer]:
    made = TextServer(("127.0.0.1", 0), lambda path: (HTTPStatus.OK, "text/plain", "hello"), EXPECTED)
    made.serve()
    try:
        yield made
    finally:
        made.close()


def test_a_silent_connection_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.1)
    with hello() as server, socket.create_connection(server.server_address[:2], timeout=60) as silent:
        silent.sendall(b"GET")
        assert silent.recv(100) == b""


def test_the_oldest_connection_makes_room_for_a_new_one(monkeypatch) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 600.0)
    with hello() as server:
        place = server.server_address[:2]
        silent = [socket.create_connection(place, timeout=60) for _ in range(MOST_CONNECTIONS)]
        until_s = time.monotonic() + 60
        while len(server._open) < MOST_CONNECTIONS and time.monotonic() < until_s:
            time.sleep(0.01)
        assert urllib.request.urlopen(f"http://127.0.0.1:{place[1]}/", timeout=60).read() == b"hello"
        assert silent[0].recv(100) == b""
        silent[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.0 200 OK")
        for one in silent:
            one.close()


def test_an_address_of_another_host_is_one_line() -> None:
    with pytest.raises(ArgumentError) as caught:
        TextServer(("192.0.2.1", 0), lambda path: (HTTPStatus.OK, "text/plain", ""), EXPECTED)
    assert one_line(caught) == f"{EXPECTED[0]}: Cannot assign requested address; choose another"
