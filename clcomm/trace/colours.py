"""Which of the trace format's reserved colours a slice has, so that colour-blind readers tell kinds apart.

chrome://tracing draws them; Perfetto's UI chooses a colour for each name by itself, on purpose, and writes names on
slices.
"""

from __future__ import annotations

#: By what a slice shows: colours like those of a report's page.
COMPUTING, WAITING, MOVING, PACKING = "rail_load", "terrible", "vsync_highlight_color", "thread_state_runnable"
DATA, OPTIMIZER, AROUND = "thread_state_iowait", "detailed_memory_dump", "grey"
_OF_CATEGORY = {"kernel": COMPUTING, "communication": MOVING}
_OF_NAME = {
    "forward_backward": COMPUTING, "wait": WAITING, "pack": PACKING, "unpack": PACKING, "data": DATA,
    "optimizer": OPTIMIZER,
}  # fmt: skip


def colour_of(name: str, category: str) -> str:
    """Return the colour of a slice; of what is around others, such as a step, a light one."""
    return _OF_NAME.get(name) or _OF_CATEGORY.get(category, AROUND)
