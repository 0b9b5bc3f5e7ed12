"""The result of a run: a line of text, the report as JSON, and whether it reached its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.insight.report.record import run_document
from training.evaluate import Evaluation
from training.options import JobOptions

if TYPE_CHECKING:
    from clcomm.insight.summary import Summary

#: The name in place of a bucket size where each tensor is reduced on its own.
PER_TENSOR = "per tensor"


@dataclass
class Result:
    """The result of a run; the figures are those of all ranks, `stats` those of an average rank."""

    steps: int
    epoch_steps: int
    images_per_s: float
    train_loss: float
    evaluation: Evaluation | None
    step_p50_s: float
    step_p95_s: float
    data_wait_s: float
    seconds: float
    overhead_share: float | None
    optimizer_state_nbytes: int | None
    memory: dict[str, int] | None
    pipeline: dict[str, Any] | None
    bucket_size: int | None
    layout: list[list[int]]
    decisions: list[dict[str, Any]]
    summary: Summary | None
    history: dict[str, Any] | None
    records: list[dict[str, Any]]
    stats: CommStats

    def headline(self) -> str:
        """Return the figures as one line of text."""
        parts = [f"{self.steps} steps", f"training loss {self.train_loss:.4f}"]
        if self.evaluation is not None:
            parts.append(f"test accuracy {self.evaluation.accuracy:.2%}")
        parts.append(f"{self.images_per_s:,.0f} images/s")
        parts.append(f"step p50 {self.step_p50_s * 1e3:.2f} ms, p95 {self.step_p95_s * 1e3:.2f} ms")
        if self.overhead_share is not None:
            parts.append(f"Python and launches {self.overhead_share:.0%} of a step")
        return "; ".join(parts)

    def as_report(self, options: JobOptions, comm: Communicator, dataset: str) -> dict[str, Any]:
        """Return the figures as the JSON of --report; docs/reports.md names its fields."""
        accuracy = self.evaluation.accuracy if self.evaluation else None
        return run_document(
            self.records,
            model=options.model,
            engine=options.engine,
            dataset=dataset,
            batch_size=options.batch_size,
            grad_accumulation=options.grad_accumulation,
            bucket_size=self.bucket_size,
            steps=self.steps,
            epoch_steps=self.epoch_steps,
            images_per_s=self.images_per_s,
            train_loss=self.train_loss,
            test_accuracy=accuracy,
            test_samples=self.evaluation.samples if self.evaluation else None,
            test_loss=self.evaluation.loss if self.evaluation else None,
            step_ms={"p50": self.step_p50_s * 1e3, "p95": self.step_p95_s * 1e3},
            data_wait_s=self.data_wait_s,
            training_s=self.seconds,
            overhead_share=self.overhead_share,
            optimizer_state_bytes=self.optimizer_state_nbytes,
            memory_bytes=self.memory,
            pipeline=self.pipeline,
            layout=self.layout,
            decisions=self.decisions,
            history=self.history,
            settings=options.settings(),
            summary=self.summary.as_dict() if self.summary else None,
        )


def missed_target(options: JobOptions, evaluation: Evaluation | None) -> str:
    """Return a line with the accuracy and the target that it missed; "" if it was reached or there is none."""
    if options.target_accuracy is None or evaluation is None or evaluation.accuracy >= options.target_accuracy:
        return ""
    return f"test accuracy {evaluation.accuracy:.2%} is below the target of {options.target_accuracy:.2%}"
