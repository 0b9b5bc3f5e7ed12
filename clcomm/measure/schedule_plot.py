"""A drawing of a schedule as a space-time diagram."""

from __future__ import annotations

from clcomm.drawing.colours import OKABE_ITO
from clcomm.drawing.png import draw, require_matplotlib
from clcomm.drawing.scene import DASHED, Mark, Scene, Text, arrow, upright
from clcomm.schedules import Schedule

#: Pixels: from a rank to the next, a round, and the names of ranks above and of rounds beside.
_RANK, _ROUND, _ABOVE, _BESIDE = 140.0, 84.0, 24.0, 70.0


def draw_schedule(schedule: Schedule, path: str) -> None:
    """Draw ranks as vertical lines, rounds downwards, and each message as an arrow in its block's colour.

    Solid arrows are added by the receiver, dashed ones copied. Raises ArgumentError without matplotlib, and if `path`
    cannot be written.
    """
    require_matplotlib("--plot")
    draw([scene_of(schedule)], path, "--plot", width=max(620.0, 2 * _BESIDE + _RANK * schedule.ranks))


def scene_of(schedule: Schedule) -> Scene:
    bottom, room = _ABOVE + _ROUND * len(schedule.rounds), _RANK * max(1, schedule.ranks - 1)

    def x(rank: int) -> float:
        return rank / max(1, schedule.ranks - 1)

    marks: list[Mark] = [Text(0.0, _ABOVE + 14, "round", shift=-_BESIDE)]
    for rank in range(schedule.ranks):
        marks += [upright(x(rank), _ABOVE, bottom, "soft"), Text(x(rank), 12.0, f"rank {rank}", "middle")]
    for number, messages in enumerate(schedule.rounds):
        top = _ABOVE + _ROUND * number
        marks.append(Text(0.0, top + _ROUND / 2 + 4, str(number + 1), shift=-_BESIDE + 8))
        for each in messages:
            begin, end = (x(each.sender), top + 0.1 * _ROUND), (x(each.receiver), top + 0.9 * _ROUND)
            colour = OKABE_ITO[each.first % len(OKABE_ITO)]
            marks += arrow(begin, end, colour, room, () if each.adds else DASHED)
    title, note = f"{schedule.name}: {schedule.messages} messages", "colour: first block; solid: added, dashed: copied"
    return Scene(title, bottom, marks, _BESIDE, _BESIDE / 2, (), note)
