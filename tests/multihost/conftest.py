"""Two hosts for the tests of this folder, where there may be any."""

from __future__ import annotations

import subprocess

import pytest

from tests.multihost.two_hosts import TwoHosts, refusal


@pytest.fixture(scope="module")
def two_hosts():
    """Two hosts, of which nothing is left afterwards."""
    reason = refusal()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with TwoHosts() as hosts:
        yield hosts
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in hosts.names)
