"""A drawing of a schedule as a space-time diagram; needs matplotlib, which is an extra."""

from __future__ import annotations

import importlib.util

from clcomm.errors import ArgumentError
from clcomm.schedules import Schedule
from clcomm.storage.files import replacing, unwritable

#: The number of colours through which blocks cycle.
_COLORS = 10


def draw_schedule(schedule: Schedule, path: str) -> None:
    """Draw ranks as vertical lines, rounds downwards, and each message as an arrow in its block's colour.

    Solid arrows are added by the receiver, dashed ones copied. Raises ArgumentError without matplotlib, and if `path`
    cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("--plot: needs matplotlib, which is not installed; pip install 'clcomm[plot]'")
    from matplotlib.figure import Figure

    rounds = len(schedule.rounds)
    figure = Figure(figsize=(2 + 1.2 * schedule.ranks, 1.5 + 0.7 * max(1, rounds)), layout="constrained")
    axes = figure.subplots()
    for rank in range(schedule.ranks):
        axes.axvline(rank, color="0.7", zorder=0)
    for number, messages in enumerate(schedule.rounds):
        for each in messages:
            style = {"arrowstyle": "->", "color": f"C{each.first % _COLORS}", "linestyle": "-" if each.adds else "--"}
            axes.annotate("", (each.receiver, number + 0.9), (each.sender, number + 0.1), arrowprops=style)
    axes.set_xlim(-0.5, schedule.ranks - 0.5)
    axes.set_ylim(max(1, rounds), 0)
    axes.set_xticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.xaxis.tick_top()
    axes.set_yticks([number + 0.5 for number in range(rounds)], [str(number + 1) for number in range(rounds)])
    axes.set_ylabel("round")
    axes.set_title(
        f"{schedule.name}: {schedule.messages} messages; colour: first block; solid: added, dashed: copied", fontsize=9
    )
    try:
        with replacing(path) as file:
            figure.savefig(file, dpi=120, format="png")
    except OSError as error:
        raise unwritable("--plot", path, error) from None
