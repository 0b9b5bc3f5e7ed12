"""TensorBoard's event files."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from clcomm.insight.exporters.figures import EPOCH, Point


class TensorBoard:
    """An event file of scalars, written in the calling thread: errors in the thread of tensorboardX's writer get lost.

    tensorboardX is imported without PyTorch, whose 190 MiB scalars don't need.

    Args:
        directory: that of the event files, a new one for each run.

    Needs tensorboardX, the extra `tensorboard`. Raises OSError if the directory can't be written.
    """

    every_s = 0.3

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        hides_torch = "torch" not in sys.modules
        if hides_torch:
            sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary
            from tensorboardX.record_writer import RecordWriter
        finally:
            if hides_torch:
                del sys.modules["torch"]
        os.makedirs(directory, exist_ok=True)
        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}"
        self._writer = RecordWriter(os.path.join(directory, name))
        self._write(file_version="brain.Event:2")

    def write(self, point: Point) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.figures.items()]
        self._write(step=point.number, summary=self._summary(value=values))
        if point.kind == EPOCH:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
