"""The colour of each part, the same in every chart: Okabe and Ito's, which colour-blind readers can distinguish.

M. Okabe, K. Ito, Color Universal Design, 2008. There are more parts than colours, so some are striped.
"""

from __future__ import annotations

from typing import NamedTuple

from clcomm.report import step_parts

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#cccccc"


class Paint(NamedTuple):
    """A colour, plain or with stripes of a lighter one."""

    colour: str
    striped: bool = False


#: Parts of one colour are of one kind: waiting for ranks or a core, moving, packing, computing.
PAINTS = {
    step_parts.DATA: Paint(ORANGE),
    step_parts.OTHER_LABELS["tuning"]: Paint(ORANGE, striped=True),
    step_parts.COMPUTING: Paint(GREEN),
    step_parts.DEVICE: Paint(GREEN, striped=True),
    step_parts.PACK: Paint(SKY),
    step_parts.UNPACK: Paint(SKY, striped=True),
    step_parts.WAIT: Paint(VERMILLION),
    step_parts.CORE: Paint(VERMILLION, striped=True),
    step_parts.moving(several=True, compressed=False): Paint(BLUE),
    step_parts.moving(several=True, compressed=True): Paint(BLUE),
    step_parts.moving(several=False, compressed=False): Paint(BLUE),
    step_parts.EITHER: Paint(BLUE, striped=True),
    step_parts.OPTIMIZER: Paint(PURPLE),
    step_parts.OTHER_LABELS["checks"]: Paint(PURPLE, striped=True),
    step_parts.HIDDEN: Paint(YELLOW),
    step_parts.CLIPPING: Paint(YELLOW, striped=True),
    "came last": Paint(VERMILLION),
    step_parts.COMPUTING_TOO: Paint(GREY, striped=True),
    step_parts.REST: Paint(GREY),
}
#: The paints of measured values, and of lines drawn for comparison.
MEASURED, COMPARED = Paint(BLUE), Paint(VERMILLION)


def paint_of(part: str) -> Paint:
    """Return a part's paint."""
    return PAINTS.get(part, Paint(GREY))


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


def css() -> str:
    """Return a CSS class for each paint; `class_of` names them."""
    rules = []
    for paint in dict.fromkeys([*PAINTS.values(), Paint(GREY)]):
        fill = f"background: {paint.colour}"
        if paint.striped:
            stripes = f"{paint.colour} 0 3px, {stripe_of(paint)} 3px 6px"
            halo = "text-shadow: 0 0 2px #fff, 0 0 3px #fff, 0 0 4px #fff"
            fill = f"background: repeating-linear-gradient(45deg, {stripes}); {halo}"
        rules.append(f".{_class(paint)} {{ {fill}; color: {ink_on(paint)}; }}")
    return "\n".join(rules) + "\n"


def class_of(part: str) -> str:
    """Return the CSS class of a part's paint."""
    return _class(paint_of(part))


def _class(paint: Paint) -> str:
    return f"p{paint.colour[1:]}{'s' if paint.striped else ''}"
