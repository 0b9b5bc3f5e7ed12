"""Kernel sizes of a device: built-in ones per kind, or the measured ones stored by `clcomm tune-kernels`.

They do not change a bit of any result: they decide how work is divided, never the order of a sum.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm.base.errors import ArgumentError
from clcomm.base.storage.files import read_regular, write_whole
from clcomm.base.storage.private import cache_directory
from clcomm.engine import selection

if TYPE_CHECKING:
    import pyopencl as cl

FORMAT = 2  # of the file; files of another format are ignored
_MOST_BYTES = 16 * 1024  # of a file
_POCL_DRIVERS = re.compile(r"^(basic|pthread|cpu-minimal|cpu)-")

Value = int | tuple[int, ...]


@dataclass(frozen=True)
class Tuning:
    """Kernel sizes: those up to loop_lanes are for CPUs, the others for other devices."""

    gemm_tile: tuple[int, int, int] = (6, 16, 8)  # rows, columns and lanes of a vector of sums in a CPU's registers
    transpose_from: int = 192  # the least of M, N and K from which columns of A evict each other from the caches
    near_cache: int = 24 * 1024  # bytes of the L1 cache for rows of a weight gradient
    conv_lanes: int = 8  # floats in a CPU's vectors of convolutions: 8 or 16
    loop_lanes: int = 8  # floats in a CPU's vectors of loops over single elements: 8 or 16
    gemm_block: tuple[int, int, int] = (16, 8, 8)  # items per side of a group, sums per side of an item, slice of K
    group: int = 256  # work-items of a group of an elementwise kernel
    conv_outputs: int = 8  # output channels that an item of a convolution computes

    def defines(self, file: str) -> dict[str, int]:
        """Return the build options of `kernels/<file>.cl` that these sizes decide."""
        found = {"LOOP_LANES": self.loop_lanes}
        if file.startswith(("conv2d_products", "conv2d_winograd")) or file == "gemm":
            found |= zip(("TILE_ROWS", "PANEL", "TILE_LANES"), self.gemm_tile, strict=True)
        if file in ("attention", "attention_gradient"):
            found["TILE_LANES"] = self.gemm_tile[2]
        if file == "conv2d_gpu":
            found["OUTPUTS"] = self.conv_outputs
        return found


_NARROW_TILES = ((6, 16, 8), (4, 16, 8), (4, 24, 8), (12, 8, 8), (8, 24, 8), (6, 32, 8))
_WIDE_TILES = ((12, 32, 16), (8, 48, 16), (14, 32, 16), (12, 16, 16))  # for 32 registers of 16 lanes
#: The values of each size, in the order in which `tune-kernels` tries them; a file with any other value is ignored.
CHOICES: dict[str, dict[str, tuple[Value, ...]]] = {
    "cpu": {
        "gemm_tile": _NARROW_TILES + _WIDE_TILES,
        "transpose_from": (192, 96, 384, 1024),
        "near_cache": (24 * 1024, 12 * 1024, 40 * 1024),
        "conv_lanes": (8, 16),
        "loop_lanes": (8, 16),
    },
    "gpu": {
        "gemm_block": ((16, 8, 8), (16, 8, 16), (16, 4, 16), (16, 4, 32), (8, 8, 8), (8, 8, 16), (8, 4, 16)),
        "group": (256, 64, 128, 512),
        "conv_outputs": (8, 4, 16),
    },
}
_SMALL_GROUP: dict[str, Any] = {"gemm_block": (8, 8, 8), "group": 64}  # for devices without groups of 256


class Identity(NamedTuple):
    """The device, kind and driver version of a table of sizes."""

    platform: str
    device: str
    driver: str
    kind: str

    @classmethod
    def of(cls, cl_device: cl.Device, kind: str) -> Identity:
        # PoCL's drivers with and without threads run the same code on the same cores, so they share a table.
        name = _POCL_DRIVERS.sub("", cl_device.name.strip())
        return cls(cl_device.platform.name.strip(), name, cl_device.driver_version.strip(), kind)

    @property
    def path(self) -> Path:
        """This device's table; raises ArgumentError if there is no cache directory."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{self.kind} {self.device}".lower()).strip("-")[:48]
        digest = sha256("\n".join(self).encode()).hexdigest()[:12]
        return cache_directory() / "tuning" / f"{name}-{digest}.json"


def choices(kind: str) -> dict[str, tuple[Value, ...]]:
    """Return the values of each size on CPUs (kind "cpu") or on other devices."""
    return CHOICES["cpu" if kind == "cpu" else "gpu"]


def defaults(cl_device: cl.Device) -> Tuning:
    """Return the built-in sizes: larger ones for wide vectors, smaller ones for small work-groups."""
    built_in = Tuning()
    if cl_device.max_work_group_size < built_in.group:
        built_in = replace(built_in, **_SMALL_GROUP)
    if has_wide_vectors(cl_device):
        built_in = replace(built_in, gemm_tile=_WIDE_TILES[0], conv_lanes=16, loop_lanes=16)
    return built_in


def has_wide_vectors(cl_device: cl.Device) -> bool:
    """Return whether a device computes with vectors of 16 floats at full speed.

    AMD's Zen 4 takes two passes for one, and for later ones PyPI's PoCL has AVX2 code alone (pocl.py): for these
    `tune-kernels` decides.
    """
    return cl_device.native_vector_width_float >= 16 and "AMD" not in f"{cl_device.vendor} {cl_device.name}"


def load(cl_device: cl.Device, kind: str) -> Tuning:
    """Return the sizes stored for a device, else the built-in ones.

    An invalid file is ignored, with a warning from the first rank of each host.
    """
    identity, built_in = Identity.of(cl_device, kind), defaults(cl_device)
    try:
        path = identity.path
    except ArgumentError:  # nothing can have been stored
        return built_in
    try:
        text = _bounded_text(path)
        return built_in if text is None else replace(built_in, **parse(text, identity))
    except (OSError, ValueError, RecursionError) as error:
        if selection.local_place()[0] == 0:
            problem = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
            warnings.warn(
                f"{path}: ignored, {problem}; `clcomm tune-kernels` writes it again", RuntimeWarning, stacklevel=3
            )
        return built_in


def is_stored(cl_device: cl.Device, kind: str) -> bool:
    """Return whether there is a file for a device, valid or not."""
    try:
        return Identity.of(cl_device, kind).path.exists()
    except ArgumentError:
        return False


def _bounded_text(path: Path) -> str | None:
    """Return a file's text, None if there is no file; raises OSError for one that cannot be a table."""
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return None


def parse(text: str, identity: Identity) -> dict[str, Any]:
    """Return the choices in a table's text; raises ValueError unless it is a valid table for this device."""
    table = json.loads(text)
    if not isinstance(table, dict) or table.keys() != {"format", "choices", *Identity._fields}:
        raise ValueError("expected a table of tuned sizes")
    if type(table["format"]) is not int or table["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    for name, own in identity._asdict().items():
        if table[name] != own:
            raise ValueError(f"expected a table for {name} {own!r}")
    allowed = choices(identity.kind)
    if not isinstance(table["choices"], dict) or not table["choices"].keys() <= allowed.keys():
        raise ValueError(f"choices: expected some of {', '.join(allowed)}")
    return {name: _checked(name, value, allowed[name]) for name, value in table["choices"].items()}


def _checked(name: str, value: object, allowed: tuple[Value, ...]) -> Value:
    numbers = value if isinstance(value, list) else [value]
    if all(type(number) is int for number in numbers):
        candidate = tuple(numbers) if isinstance(value, list) else value
        if candidate in allowed:
            return candidate
    raise ValueError(f"choices: {name}: expected one of {', '.join(str(choice) for choice in allowed)}")


def store(tuning: Tuning, identity: Identity) -> Path:
    """Write the sizes of a device atomically; raises ArgumentError if that fails."""
    path, allowed = identity.path, choices(identity.kind)
    chosen = {field.name: getattr(tuning, field.name) for field in fields(tuning) if field.name in allowed}
    table = {"format": FORMAT, **identity._asdict(), "choices": chosen}
    write_whole(path, json.dumps(table, indent=1) + "\n", "CLCOMM_CACHE_DIR")
    return path


def forget(identity: Identity) -> bool:
    """Delete the stored sizes of a device; return whether there were any."""
    try:
        identity.path.unlink()
    except FileNotFoundError:
        return False
    return True
