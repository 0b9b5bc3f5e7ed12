"""Speed and loss of a run, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from clcomm.stats.comm_stats import Histogram

#: The number of steps at the start that don't count towards speed: they build kernels and fill caches.
WARM_UP_STEPS = 10


@dataclass
class StepRecord:
    """One finished step, for callbacks. `loss` is this rank's; `seconds` of the whole step include `data_wait_s`.

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
    all_samples: int | None = None

    def samples_of_all(self, world_size: int) -> int:
        """Return the samples of all ranks in this step."""
        return self.samples * world_size if self.all_samples is None else self.all_samples


@dataclass
class Metrics:
    """Totals over this rank's steps of this run; `cpu_s` is the processor time of all its threads in them."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    cpu_s: float = 0.0
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
        if self.steps <= WARM_UP_STEPS:
            self.cold_durations.add(record.seconds)
            return
        self.warm_samples += record.samples
        self.warm_seconds += record.seconds
        self.warm_durations.add(record.seconds)

    def start_epoch(self) -> None:
        """Set the epoch's loss and samples to zero."""
        self.epoch_loss, self.epoch_samples = 0.0, 0

    def samples_per_s(self) -> float:
        """Return this rank's samples per second, without the first WARM_UP_STEPS unless there are no others."""
        samples, seconds = self.warm_samples, self.warm_seconds
        if not samples:
            samples, seconds = self.samples, self.seconds
        return samples / seconds if seconds else 0.0

    def step_s(self, share: float) -> float:
        """Return a percentile of the steps' seconds, without the first WARM_UP_STEPS unless there are no others.

        `share` is the percentile as a share, 0 to 1: 0.5 is the median.
        """
        durations = self.warm_durations if self.warm_samples else self.cold_durations
        return durations.percentile(share)
