"""A site that vanishes for a while under a policy: the other names it in its next outer step, and both go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multihost.cable import ip
from tests.multihost.two_hosts import ROOT, TwoHosts, environment

HUNG_S, AWAY_S = 90, 4.0


def trained(
    hosts: TwoHosts, policy: str, place: Path, vanish: Callable[[int], None] | None = None
) -> tuple[list[str], str]:
    """Return the ranks' digests and a job's errors; vanish: called with the last rank's process in its sixth step."""
    command = hosts.command((1, 1), ["-m", "tests.multihost.rare", policy, str(place)])
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        deadline = time.monotonic() + HUNG_S
        while vanish is not None and not place.exists():
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        if vanish is not None:
            vanish(int(place.read_text()))
        try:
            said, errors = job.communicate(timeout=HUNG_S)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    assert job.returncode == 0, errors
    return json.loads(said), errors


@pytest.mark.parametrize(("policy", "way"), [("diloco:h=10", "stopped"), ("noloco:h=10", "cut")])
def test_a_site_that_vanishes_for_a_while_is_waited_for(two_hosts: TwoHosts, tmp_path: Path, policy: str, way: str):
    def vanish(process: int) -> None:
        if way == "stopped":
            os.kill(process, signal.SIGSTOP)
        else:
            ip("-n", two_hosts.names[1], "link", "set", two_hosts.devices[1], "down")
        time.sleep(AWAY_S)
        if way == "stopped":
            os.kill(process, signal.SIGCONT)
        else:
            ip("-n", two_hosts.names[1], "link", "set", two_hosts.devices[1], "up")

    undisturbed, _ = trained(two_hosts, policy, tmp_path / "first")
    found, errors = trained(two_hosts, policy, tmp_path / "second", vanish)
    assert found == undisturbed == undisturbed[:1] * 2
    assert re.search(r"^clcomm: rank 0 has waited [\d.]+ s in \w+ .*'outer gradients'", errors, re.MULTILINE), errors
