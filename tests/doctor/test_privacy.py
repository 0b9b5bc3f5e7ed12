"""`clcomm doctor`: whether messages between hosts went through WireGuard, by what interfaces counted."""

from __future__ import annotations

import pytest

from clcomm.tools.doctor import network
from clcomm.tools.doctor.job import JobFacts

SENT = network._LARGE * network._LARGE_SENT


def test_interfaces_are_told_apart(tmp_path, monkeypatch):
    for name, uevent in {
        "wg0": "DEVTYPE=wireguard\nINTERFACE=wg0\n",
        "eth0": "INTERFACE=eth0\n",
        "tun1": "",
        "tun2": "",
    }.items():
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "uevent").write_text(uevent)
        (tmp_path / name / "statistics" / "tx_bytes").write_text("17\n")
    for name in ("tun1", "tun2"):
        (tmp_path / name / "tun_flags").write_text("0x1\n")
    (tmp_path / "tun2.sock").touch()
    monkeypatch.setattr(network, "_SYSTEM", tmp_path)
    monkeypatch.setattr(network, "_SOCKETS", tmp_path)
    assert [name for name in ("wg0", "eth0", "tun1", "tun2", "gone") if network.is_wireguard(name)] == ["wg0", "tun2"]
    assert network.sent_nbytes() == dict.fromkeys(("wg0", "eth0", "tun1", "tun2"), 17)


@pytest.mark.parametrize(
    ("tunnels", "level"),
    [({}, None), ({"wg0": SENT + 99}, "ok"), ({"wg0": SENT // 2}, "problem"), ({"wg0": 0, "wg1": 99}, "problem")],
)
def test_what_the_tunnel_did_not_carry_is_a_problem(tunnels, level):
    speed = {"latency_s": 1e-5, "bytes_per_s": 1e9, "tunnels": tunnels}
    ranks = [{"place": {"host": "a"}, "network": {"b": speed}}, {"place": {"host": "b"}}]
    findings = {found.check: found for found in network.check(JobFacts(ranks, True))}
    assert findings["network"].level == "ok" and "tunnels" not in findings["network"].evidence
    assert ("privacy" in findings) == (level is not None)
    if level is not None:
        found = findings["privacy"]
        assert found.level == level and all(name in found.what for name in tunnels) and "\n" not in found.what
