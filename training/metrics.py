"""Speed and loss of a run, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from clcomm.comm.stats.comm_stats import Histogram
from clcomm.comm.stats.steps import WARM_UP_STEPS

#: After the first steps, which are all measured, the processor time of every so many steps is measured: reading it
#: takes a system call. No policy's usual period falls on them.
PROCESSOR_TIME_EVERY = 7


class StepRecord(NamedTuple):
    """One finished step, for callbacks.

    `loss` is this rank's; `seconds` of the whole step include `data_wait_s`, and `communication_s` in collectives that
    kept the rank from computing. `cpu_s` is the processor time of all threads; None: not measured in this step.
    `all_samples` are those of all ranks; None: as many on each.
    """

    step: int
    epoch: int
    batch: int
    samples: int
    loss: float
    lr: float
    seconds: float
    data_wait_s: float
    communication_s: float = 0.0
    cpu_s: float | None = None
    all_samples: int | None = None

    def samples_of_all(self, world_size: int) -> int:
        """Return the samples of all ranks in this step."""
        return self.samples * world_size if self.all_samples is None else self.all_samples


@dataclass
class Metrics:
    """Totals over this rank's steps of this run.

    `measured_cpu_s` is the processor time of the steps of which it was measured, and `measured_s` their time; both
    without the first WARM_UP_STEPS, whose processor time is `cold_cpu_s`.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    cold_cpu_s: float = 0.0
    measured_cpu_s: float = 0.0
    measured_s: float = 0.0
    first_samples: int = 0
    first_seconds: float = 0.0
    warm_samples: int = 0
    warm_seconds: float = 0.0
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    cold_durations: Histogram = field(default_factory=Histogram)
    warm_durations: Histogram = field(default_factory=Histogram)

    def add(self, record: StepRecord) -> None:
        """Add one step."""
        self.steps += 1
        self.samples += record.samples
        self.seconds += record.seconds
        self.data_wait_s += record.data_wait_s
        self.epoch_loss += record.loss * record.samples
        self.epoch_samples += record.samples
        if self.steps == 1:
            self.first_samples, self.first_seconds = record.samples, record.seconds
        if self.steps <= WARM_UP_STEPS:
            self.cold_durations.add(record.seconds)
            self.cold_cpu_s += record.cpu_s or 0.0
            return
        if record.cpu_s is not None:
            self.measured_cpu_s += record.cpu_s
            self.measured_s += record.seconds
        self.warm_samples += record.samples
        self.warm_seconds += record.seconds
        self.warm_durations.add(record.seconds)

    @property
    def cpu_s(self) -> float:
        """The processor time of all threads in the steps, in seconds: measured in some, estimated from them for all."""
        scale = self.warm_seconds / self.measured_s if self.measured_s else 1.0
        return self.cold_cpu_s + self.measured_cpu_s * scale

    def start_epoch(self) -> None:
        """Set the epoch's loss and samples to zero."""
        self.epoch_loss, self.epoch_samples = 0.0, 0

    def samples_per_s(self) -> float:
        """Return this rank's samples per second, without the first WARM_UP_STEPS; of fewer without the first."""
        samples, seconds = self.warm_samples, self.warm_seconds
        if not samples:
            samples, seconds = self.samples - self.first_samples, self.seconds - self.first_seconds
        if not samples:
            samples, seconds = self.samples, self.seconds
        return samples / seconds if seconds else 0.0

    def step_s(self, share: float) -> float:
        """Return a percentile of the steps' seconds, without the first WARM_UP_STEPS unless there are no others.

        `share` is the percentile as a share, 0 to 1: 0.5 is the median.
        """
        durations = self.warm_durations if self.warm_samples else self.cold_durations
        return durations.percentile(share)
