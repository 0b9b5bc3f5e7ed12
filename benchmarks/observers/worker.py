"""A rank of a training run whose observers change from window to window."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.workers import serve
from clcomm import Communicator, Synchronizer
from clcomm.comm.stats.events import Collective, Phase
from clcomm.insight.trace import Trace
from clcomm.sync.sampler import DistributedSampler
from training.data.datasets import load_synthetic
from training.data.loader import Loader
from training.engines.parts import Placement, build_parts
from training.trainer import Trainer

#: Steps after a change of observers that do not count.
_SETTLING_STEPS = 3


class Watched:
    """A Trainer on synthetic images, and windows of its steps."""

    def __init__(self, comm: Communicator, model: str, batch: int, folder: Path):
        data = load_synthetic().train
        self.comm, self._trace = comm, folder / "trace.json"
        self.parts = build_parts(
            "native", model, data.image_shape, data.classes, seed=0,
            device=Placement(None, comm.local_rank, comm.local_size, comm.cores),
        )  # fmt: skip
        loader = Loader(data, DistributedSampler(len(data), comm.rank, comm.size), batch, prefetch=0)
        trainer = Trainer(comm, Synchronizer(comm), self.parts, self.parts.make_optimizer("sgd", 0.01), loader)
        self._steps = trainer.train(epochs=10**9)

    def run(self, count: int) -> None:
        for _ in range(count):
            next(self._steps)

    def window(self, watchers: str, steps: int) -> dict[str, Any]:
        """Return a step's seconds by the clock and of processor time, with "none", "stats" or "trace" observing."""
        with self._watching(watchers):
            self.run(_SETTLING_STEPS)
            begin, cpu = time.perf_counter(), time.process_time()
            self.run(steps)
            return {"wall": (time.perf_counter() - begin) / steps, "cpu": (time.process_time() - cpu) / steps}

    @contextmanager
    def _watching(self, watchers: str) -> Iterator[None]:
        comm = self.comm
        if watchers == "trace":
            with Trace(comm, self._trace, device=self.parts.opencl):
                yield
            return
        if watchers == "none":
            comm.remove_observer(comm.stats)
        yield
        if watchers == "none":
            comm.add_observer(comm.stats)

    def events(self) -> dict[str, int]:
        """Return the number of a step's events, by kind."""
        counts = Counts()
        self.run(_SETTLING_STEPS)
        assert self.parts.opencl is not None
        self.comm.add_observer(counts)
        with self.parts.opencl.profile() as profile:
            self.run(1)
        self.comm.remove_observer(counts)
        return {**counts.counts, "kernel": len(profile.launches)}


class Counts:
    """An observer that counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def collective_finished(self, event: Collective) -> None:
        self.counts["collective"] += 1

    def phase_finished(self, phase: Phase) -> None:
        self.counts["phase"] += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True)
    given, comm = parser.parse_args(), Communicator()
    watched = Watched(comm, given.model, given.batch, Path(given.directory))

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        return watched.window(request["watchers"], request["steps"]) if "watchers" in request else watched.events()

    serve(given.directory, comm.rank, handle)


if __name__ == "__main__":
    main()
