"""Devices of one machine compared by the rate at which they train."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clcomm.engine import autotune
from clcomm.engine.device import Device
from clcomm.engine.selection import DeviceCandidate
from clcomm.tools.commands.devices import comparison


def test_every_device_has_its_own_rate(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs by the steps made tells which device was timed."""
    now, cost = [0.0], {0: 0.01, 1: 0.04}
    make = autotune._make_step

    def slowed(chosen: Device, made: list[int] = []) -> object:  # noqa: B006 - counts the devices
        number, step = len(made), make(chosen)
        made.append(number)

        def run(count: int) -> None:
            step(1)
            now[0] += cost[number] * count

        return run

    monkeypatch.setattr(autotune, "_make_step", slowed)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert autotune.training_rates([device, device]) == pytest.approx([6400, 1600])


@pytest.mark.parametrize(("rates", "fastest", "gain"), [((900, 600), 0, "1.50"), ((50, 100, 80), 1, "1.25")])
def test_the_fastest_is_named(rates: tuple[float, ...], fastest: int, gain: str) -> None:
    names = [f"Runtime {number}" for number in range(len(rates))]
    cpus = [
        DeviceCandidate(f"cpu:{number}", "cpu", SimpleNamespace(platform=SimpleNamespace(name=name)))
        for number, name in enumerate(names)
    ]
    text = comparison(cpus, rates, 2)
    assert f"cpu:{fastest} (Runtime {fastest}) is {gain}x as fast" in text and "on 2 cores" in text
    assert all(f"cpu:{number} {rate:,.0f} images/s" in text for number, rate in enumerate(rates))
