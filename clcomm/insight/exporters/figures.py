"""The figures that a run exports, their labels, and the interface of all that export them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol


class Figure(NamedTuple):
    """A figure by its tag in TensorBoard and trackers, and as a metric.

    Attributes:
        metric: its name in Prometheus and OpenTelemetry, in base units.
        scale: the metric's value for a figure of 1.
    """

    tag: str
    metric: str
    unit: str
    help: str
    scale: float = 1.0


#: All figures. Those of steps are means over the steps since the last point.
FIGURES = (
    Figure("train/loss", "clcomm_train_loss", "", "Training loss of this rank's samples"),
    Figure("train/lr", "clcomm_learning_rate", "", "Learning rate"),
    Figure("train/epoch_loss", "clcomm_epoch_loss", "", "Mean training loss of the last epoch, over all ranks"),
    Figure("test/loss", "clcomm_test_loss", "", "Loss on the test set"),
    Figure("test/accuracy", "clcomm_test_accuracy_ratio", "1", "Accuracy on the test set, 0 to 1"),
    Figure("speed/images_per_s", "clcomm_samples_per_second", "1/s", "Samples of all ranks a second"),
    Figure("speed/step_ms", "clcomm_step_seconds", "s", "Time of a step", 1e-3),
    Figure("speed/data_wait_share", "clcomm_data_wait_ratio", "1", "Share of a step spent waiting for data"),
    Figure("speed/communication_share", "clcomm_communication_ratio", "1",
           "Share of a step in which collectives kept this rank from computing"),
    Figure("energy/joules_per_step", "clcomm_step_joules", "J", "Energy of this rank's host in a step"),
    Figure("energy/joules_per_sample", "clcomm_sample_joules", "J", "Energy of this rank's host for a sample"),
)  # fmt: skip
#: The metric of the last step's number, which each `write` has.
STEP = Figure("step", "clcomm_step", "", "Optimizer steps so far")


class Labels(NamedTuple):
    """Whose figures they are: `axis` is the rank's place in the job's mesh, such as "dp=1, tp=0"."""

    rank: int
    host: str
    axis: str


class Point(NamedTuple):
    """Figures by their tags, of some steps, an evaluation or an epoch.

    Attributes:
        kind: STEPS, EVALUATION or EPOCH.
        number: the last optimizer step; of an epoch its own number, from 1.
        began_s: when that which they measure began, and ended; as time.time() has it.
    """

    kind: str
    number: int
    figures: Mapping[str, float]
    began_s: float
    ended_s: float


STEPS, EVALUATION, EPOCH = "steps", "evaluation", "epoch"


class Exporter(Protocol):
    """Takes a run's points; raises OSError where it can't go on.

    Attributes:
        every_s: the least training time between two points of steps, so that they cost under 0.1% of it.
    """

    every_s: float

    def write(self, point: Point) -> None:
        """Take a point."""

    def close(self) -> None:
        """Write the rest, and release files and sockets."""


# --- A host's energy, from the counters of its processors and GPUs that Linux has. ---

MICRO = 1e-6


class EnergyMeter:
    """Adds up the joules of all counters since it was made.

    These are each processor package of powercap (RAPL's `energy_uj`; packages alone, as their parts are within them),
    and `energy1_input` of GPU drivers that have one, such as Intel's i915 and xe.

    Args:
        root: of the tree with `class/powercap` and `class/hwmon`.

    Attributes:
        reason: why there is nothing to read; "" if there is.
    """

    def __init__(self, root: str | Path = "/sys"):
        self._last = {path: (read(path), most) for path, most in counters(Path(root))}
        unreadable = [str(path) for path, (value, _) in self._last.items() if value is None]
        self._last = {path: found for path, found in self._last.items() if found[0] is not None}
        self._joules = 0.0
        self.reason = ""
        if not self._last:
            why = f"{unreadable[0]} is readable by root alone" if unreadable else "this host has no counter of energy"
            self.reason = f"energy: not measured, as {why}"

    def joules(self) -> float:
        """Return the energy since this was made; counters that began again at 0 are allowed for."""
        for path, (before, most) in self._last.items():
            now = read(path)
            if now is None or before is None:
                continue
            used = now - before
            self._joules += (used if used >= 0 else used + most) * MICRO
            self._last[path] = now, most
        return self._joules


def counters(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the path of each counter, in microjoules, and the value after which it begins again at 0."""
    for zone in sorted((root / "class" / "powercap").glob("*:*")):
        if zone.name.count(":") == 1 and (zone / "energy_uj").exists() and "mmio" not in zone.name:
            yield zone / "energy_uj", read(zone / "max_energy_range_uj") or 0
    for path in sorted((root / "class" / "hwmon").glob("hwmon*/energy1_input")):
        yield path, 1 << 64


def read(path: Path) -> int | None:
    """Return the number in a file; None if it can't be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
