"""The colour of each part, the same in every chart; there are more parts than colours, so some are striped."""

from __future__ import annotations

from clcomm.insight.drawing.scene import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, Paint
from clcomm.insight.report import step_parts
from clcomm.sync.clipping import CLIPPING

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
    CLIPPING: Paint(YELLOW, striped=True),
    "came last": Paint(VERMILLION),
    step_parts.COMPUTING_TOO: Paint(GREY, striped=True),
    step_parts.REST: Paint(GREY),
}


def paint_of(part: str) -> Paint:
    return PAINTS.get(part, Paint(GREY))
