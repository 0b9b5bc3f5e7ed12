"""WireGuard between hosts: nothing in the clear on the cable, and `clcomm doctor` says whether it is so."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.multihost.tunnel import Listener, Tunnel, lacking
from tests.multihost.two_hosts import ADDRESSES, ROOT, TUNNEL_ADDRESSES, TwoHosts, environment, refusal

TEXT, HUNG_S = "a gradient that nobody else should see", 90
_SEND = f"""
import numpy
from clcomm import Communicator
comm = Communicator()
text = numpy.frombuffer(b"{TEXT}" * 20_000, numpy.uint8).copy()
for _ in range(4):
    comm.broadcast(text)
"""


@pytest.fixture(scope="module")
def hosts():
    reason = refusal() or lacking()
    if reason:
        pytest.skip(f"WireGuard between two hosts: {reason}")
    with TwoHosts() as hosts, Tunnel(hosts) as tunnel:
        yield hosts, {"UCX_NET_DEVICES": ",".join(tunnel.names), "UCX_LOG_LEVEL": "error"}


def run(hosts: TwoHosts, arguments: list[str], addresses, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        hosts.command((1, 1), arguments, addresses=addresses), cwd=ROOT, env={**environment(), **variables},
        capture_output=True, text=True, timeout=HUNG_S, check=False,
    )  # fmt: skip


def test_nothing_is_in_the_clear_where_mpi_uses_the_tunnel_alone(hosts):
    two, through_tunnel = hosts
    counts = []
    for addresses, variables in ((ADDRESSES, {}), (TUNNEL_ADDRESSES, through_tunnel)):
        with Listener(two, TEXT) as listener:
            ended = run(two, ["-c", _SEND], addresses, **variables)
        assert ended.returncode == 0, ended.stderr
        counts.append(listener.found)
    assert counts[0] > 20_000 and counts[1] == 0


@pytest.mark.parametrize(("alone", "level"), [(False, "problem"), (True, "ok")])
def test_doctor_tells_whether_the_tunnel_carried_it(hosts, alone, level):
    two, through_tunnel = hosts
    ended = run(two, ["-m", "clcomm", "doctor", "--json"], TUNNEL_ADDRESSES, **(through_tunnel if alone else {}))
    findings = json.loads(ended.stdout)["findings"]
    (found,) = [each for each in findings if each["check"] == "privacy"]
    assert found["level"] == level and two.devices[0] + "w" in found["what"]
