"""A timeline as an archive of the Open Trace Format 2, which Vampir, Scalasca and Score-P's tools read.

The format is that of https://www.vi-hps.org/projects/score-p; its library's wheel, `otf2`, is needed to write it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clcomm.errors import ArgumentError, needed
from clcomm.trace.slices import TOLERANCE_NS
from clcomm.trace.timeline import Span, Timeline

_TICKS_PER_S = 1_000_000_000


def write_otf2(ranks: Sequence[Timeline], folder: Path) -> list[Path]:
    """Write an archive into a new folder, with a location for each row of each rank's threads; return its anchor.

    A collective's bytes, bucket and sequence number are attributes of its region's enter event.
    Raises ArgumentError without the wheel, and for a folder that is there already, which its library would not replace.
    """
    with needed("otf2"):
        import otf2
        from otf2.enums import Type
    if folder.exists():
        raise ArgumentError(f"-o: expected a folder that is not there yet, got {str(folder)!r}")
    with otf2.writer.open(str(folder), timer_resolution=_TICKS_PER_S) as archive:
        define = archive.definitions
        regions = {name: define.region(name) for name in sorted({span.name for one in ranks for span in one.spans})}
        attributes = {
            name: define.attribute(name, type=Type.UINT64) for name in ("bytes", "bucket", "sequence", "step")
        }
        machine = define.system_tree_node("job")
        for one in ranks:
            group = define.location_group(f"rank {one.rank}", system_tree_parent=machine)
            for thread, spans in itertools.groupby(sorted(one.spans, key=lambda span: span.thread), _thread_of):
                writer = archive.event_writer(one.threads.get(thread, str(thread)), group=group)
                for at_ns, enters, span in edges(list(spans)):
                    if enters:
                        given = {attributes[name]: int(span.args[name]) for name in attributes if name in span.args}
                        writer.enter(at_ns, regions[span.name], attributes=given)
                    else:
                        writer.leave(at_ns, regions[span.name])
    return [folder / "traces.otf2"]


def _thread_of(span: Span) -> Any:
    return span.thread


def edges(spans: Sequence[Span]) -> Iterator[tuple[int, bool, Span]]:
    """Yield (time, whether it begins, slice) of slices that are nested up to the error of clocks, in order of time."""
    inside: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        while inside and inside[-1].end_ns <= span.begin_ns + (TOLERANCE_NS if inside[-1].end_ns < span.end_ns else 0):
            done = inside.pop()
            yield min(done.end_ns, span.begin_ns), False, done
        end_ns = min(span.end_ns, inside[-1].end_ns) if inside else span.end_ns
        inside.append(span._replace(end_ns=end_ns))
        yield span.begin_ns, True, span
    while inside:
        done = inside.pop()
        yield done.end_ns, False, done
