"""Kernels that move parameters between float32 and 16 bits, bit by bit, between elements that stay as they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clcomm.base.flat_space.parameters import BF16, FP16, Precision
from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.engine.device import Device
from clcomm.engine.parameter import Storage
from tests.families.family import Family, drawn

_AROUND = 0xABCD  # what is stored around the range


class Case(NamedTuple):
    """`count` elements from `first` on, whose values begin at `first_value`."""

    count: int
    first: int
    first_value: int
    seed: int


def draw(rng: np.random.Generator, longest: int, number: int) -> Case:
    """Draw up to a few vectors, at any place."""
    return Case(*(int(rng.integers(low, 3 * longest)) for low in (1, 0, 0)), int(rng.integers(1 << 30)))


def special_values(rng: np.random.Generator, count: int, precision: Precision) -> np.ndarray:
    """Return float32 of any bits, and numbers halfway between two of 16 bits or next to that."""
    bits = rng.integers(0, 1 << 32, count, np.uint32)
    stored = rng.integers(0, 1 << 16, count, np.uint16)
    below, above = (value_of(np.minimum(each, 0xFFFF), precision) for each in (stored, stored.astype(np.uint32) + 1))
    with np.errstate(all="ignore"):
        halfway = ((below.astype(np.float64) + above) / 2).astype(np.float32)
        near = np.nextafter(halfway, rng.choice(np.array([-np.inf, np.inf], np.float32), count))
    kind = rng.integers(0, 4, count)
    return np.select([kind == 0, kind == 1, kind == 2], [bits.view(np.float32), halfway, near], below)


def stored_of(values: np.ndarray, precision: Precision) -> np.ndarray:
    """Return float32 values as uint16 bits, rounded to nearest, ties to even."""
    if precision is BF16:
        return to_bfloat16(values).view(np.uint16)
    with np.errstate(all="ignore"):
        return values.astype(np.float16).view(np.uint16)


def value_of(bits: np.ndarray, precision: Precision) -> np.ndarray:
    """Return what 16 bits stand for."""
    bits = bits.astype(np.uint16)
    return from_bfloat16(bits) if precision is BF16 else bits.view(np.float16).astype(np.float32)


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether arrays are equal bit by bit, but for the bits of NaN."""
    both = np.isnan(found) & np.isnan(expected)
    return bool((both | (found.view(np.uint32) == expected.view(np.uint32))).all())


def check(device: Device, case: Case) -> None:
    """Compare rounding, expansion and masters with NumPy's."""
    device.has_half = True
    count, first, begin, seed = case
    for precision in (BF16, FP16):
        rng, storage = np.random.default_rng(seed), Storage(device, precision)
        values = special_values(rng, begin + count, precision)
        expected = stored_of(values[begin:], precision)
        stored = device.upload(np.full(first + count + 3, _AROUND, np.uint16))
        storage.narrow(stored, device.upload(values), first, begin, count)
        found = np.empty(first + count + 3, np.uint16)
        device.read(stored, found)
        assert same(value_of(found[first : first + count], precision), value_of(expected, precision)), precision
        assert (np.delete(found, np.r_[first : first + count]) == _AROUND).all(), "it wrote outside its range"
        expanded = device.allocate(4 * count)
        storage.expand(stored, expanded, first, count)
        assert same(_read(device, expanded, count), value_of(expected, precision)), precision
        # A master stays where it rounds to what is stored.
        changed = rng.random(count) < 0.5
        now = np.where(changed, rng.integers(0, 1 << 16, count, np.uint16), found[first : first + count])
        found[first : first + count] = now
        masters = device.upload(values)
        storage.reconcile(device.upload(found), masters, first, begin, count)
        kept = stored_of(values[begin:], precision) == now
        reconciled = np.where(kept, values[begin:], value_of(now, precision))
        assert same(_read(device, masters, begin + count), np.concatenate([values[:begin], reconciled])), precision


def _read(device: Device, buffer: object, count: int) -> np.ndarray:
    values = np.empty(count, np.float32)
    device.read(buffer, values)
    return values


STORED = Family("stored parameters", drawn(draw), check)
