"""A host's energy, from the counters of its processors and GPUs that Linux has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
