"""The colour of each kind of slice, a reserved name of the trace format; colour-blind readers can distinguish them.

chrome://tracing uses these colours; Perfetto's UI ignores them and chooses a colour for each name itself.
"""

from __future__ import annotations

#: By kind of slice, similar to the colours of a report's page.
COMPUTING, WAITING, MOVING, PACKING = "rail_load", "terrible", "vsync_highlight_color", "thread_state_runnable"
DATA, OPTIMIZER, AROUND = "thread_state_iowait", "detailed_memory_dump", "grey"
#: A backward apart from its forward, as a pipeline has them.
BACKWARD = "startup"
_OF_CATEGORY = {"kernel": COMPUTING, "communication": MOVING}
_OF_NAME = {
    "forward_backward": COMPUTING, "forward": COMPUTING, "backward": BACKWARD, "wait": WAITING, "pack": PACKING,
    "unpack": PACKING, "data": DATA, "optimizer": OPTIMIZER,
}  # fmt: skip


def colour_of(name: str, category: str) -> str:
    """Return the colour of a slice; a light one for those that enclose others, such as steps."""
    return _OF_NAME.get(name) or _OF_CATEGORY.get(category, AROUND)
