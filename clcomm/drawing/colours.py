"""Okabe and Ito's colours, which colour-blind readers can distinguish, and what is legible on them.

M. Okabe, K. Ito, Color Universal Design, 2008.
"""

from __future__ import annotations

from typing import NamedTuple

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#cccccc"
OKABE_ITO = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000")


class Paint(NamedTuple):
    """A colour, plain or with stripes of a lighter one."""

    colour: str
    striped: bool = False


def stripe_of(paint: Paint) -> str:
    """Return the colour of a paint's stripes: halfway to white."""
    red, green, blue = (int(paint.colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"#{(red + 255) // 2:02x}{(green + 255) // 2:02x}{(blue + 255) // 2:02x}"


def ink_on(paint: Paint) -> str:
    """Return black or white, the more legible one on a paint."""
    return "#000000" if paint.striped or luminance(paint.colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return a colour's relative luminance, 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
