"""Energy from planted trees of counters, and what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from clcomm.insight.exporters import EnergyMeter
from clcomm.insight.exporters.figures import STEPS, Point
from training.loggers import POINT_EVERY, PointLogger
from training.metrics import StepRecord


def plant(root: Path, **counters: int) -> None:
    """Write counters: `package`, its part `core`, its other window `mmio`, and a driver's `gpu`, in microjoules."""
    zones = {"package": "intel-rapl:0", "core": "intel-rapl:0:0", "mmio": "intel-rapl-mmio:0"}
    for name, value in counters.items():
        folder = root / "class" / ("hwmon/hwmon2" if name == "gpu" else f"powercap/{zones[name]}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("energy1_input" if name == "gpu" else "energy_uj")).write_text(f"{value}\n")
        if name != "gpu":
            (folder / "max_energy_range_uj").write_text("1000000000\n")


def test_packages_and_gpus_add_up_and_parts_do_not(tmp_path: Path) -> None:
    plant(tmp_path, package=5_000_000, core=1_000_000, mmio=5_000_000, gpu=70_000_000)
    meter = EnergyMeter(tmp_path)
    assert (meter.reason, meter.joules()) == ("", 0.0)
    plant(tmp_path, package=7_000_000, core=2_000_000, mmio=7_000_000, gpu=70_500_000)
    assert meter.joules() == pytest.approx(2.5)
    assert meter.joules() == pytest.approx(2.5)


def test_a_counter_that_begins_again_is_allowed_for(tmp_path: Path) -> None:
    plant(tmp_path, package=999_000_000)
    meter = EnergyMeter(tmp_path)
    plant(tmp_path, package=2_000_000)
    assert meter.joules() == pytest.approx(3.0)


def test_without_a_counter_it_says_so(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert meter.reason == "energy: not measured, as this host has no counter of energy"
    assert meter.joules() == 0.0


def test_of_a_counter_that_cannot_be_read_it_says_so(tmp_path: Path) -> None:
    plant(tmp_path, package=1)
    path = tmp_path / "class" / "powercap" / "intel-rapl:0" / "energy_uj"
    path.write_text("")  # as good as one without permission, which root has
    assert EnergyMeter(tmp_path).reason == f"energy: not measured, as {path} is readable by root alone"


class Kept:
    """An exporter that keeps its points."""

    every_s = 0.0

    def __init__(self) -> None:
        self.points: list[Point] = []

    def write(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        pass


def test_joules_are_divided_by_steps_and_by_the_samples_of_the_hosts_ranks(tmp_path: Path) -> None:
    plant(tmp_path, package=0)
    exporter = Kept()
    logger = PointLogger(exporter, world_size=4, energy=EnergyMeter(tmp_path), ranks_here=2)
    plant(tmp_path, package=POINT_EVERY * 1_000_000)
    for step in range(1, POINT_EVERY + 1):
        logger.step_finished(StepRecord(step, 0, step, 32, 1.0, 0.1, 0.01, 0.0))
    logger.close()
    (point,) = exporter.points
    assert point.kind == STEPS and point.figures["energy/joules_per_step"] == pytest.approx(1.0)
    assert point.figures["energy/joules_per_sample"] == pytest.approx(1 / 64)
