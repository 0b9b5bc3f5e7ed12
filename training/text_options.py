"""The options of a run that trains a language model on a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from clcomm.base.console.option_types import number, whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.schedules.pipeline import INTERLEAVED, ONE_F_ONE_B, SCHEDULES
from training.option_fields import fixed, option_group
from training.options import OPTIMIZERS, TrainingOptions

_data = option_group("model and data")
_optimizer = option_group("optimizer")
_output = option_group("evaluation and output")


@dataclass(frozen=True, kw_only=True)
class TextOptions(TrainingOptions):
    """The options of one training run of a GPT, such as `TextOptions(layers=2, max_steps=100)`."""

    USUAL: ClassVar[tuple[str, ...]] = (
        "preset", "text", "layers", "width", "context", "batch_size", "max_steps", "logical_shards", "lr", "sample",
        "report", "checkpoint", "resume",
    )  # fmt: skip
    SAMPLES: ClassVar[str] = "sequences"
    ALSO_SHARED: ClassVar[tuple[str, ...]] = ("layers", "width", "heads", "context", "tied_head", "dropout")

    model: str = fixed("gpt")
    engine: str = fixed("native")
    data: str = fixed("text")
    augment: bool = fixed(False)
    target_accuracy: float | None = fixed(None)

    text: str | None = _data(
        None, "a text file in UTF-8; default: the sources of Python's standard library", metavar="FILE"
    )
    layers: int = _data(6, "of the model", whole_number(1), metavar="N")
    width: int = _data(192, "values of a token between layers", whole_number(1), metavar="N")
    heads: int = _data(6, "of each attention; they divide the width", whole_number(1), metavar="N")
    context: int = _data(256, "characters that the model sees", whole_number(1), metavar="N")
    tied_head: bool = _data(True, "the head's weight is the embedding's")
    dropout: float = _data(0.0, "share of values that training drops", number(), metavar="SHARE")
    recompute: bool = _data(False, "compute the blocks' activations again in backward, which need less memory so")
    tp: int = _data(
        1, "ranks that divide each layer's heads and weights; the others have sequences of their own", whole_number(1),
        metavar="N",
    )  # fmt: skip
    pp: int = _data(
        1, "ranks that divide the layers into stages of a pipeline; the others have sequences of their own",
        whole_number(1), metavar="N",
    )  # fmt: skip
    micro_batches: int | None = _data(
        None, "parts of a batch that the stages of --pp work on at the same time; default: the fewest from twice the "
        "stages up that divide it", whole_number(1), metavar="N",
    )  # fmt: skip
    pp_schedule: str = _data(ONE_F_ONE_B, "the order of the stages' forwards and backwards", choices=SCHEDULES)
    batch_size: int = _data(8, "a rank's windows of the text", whole_number(1), metavar="N")
    epochs: int | None = _data(1, "times that the text is read", whole_number(1), metavar="N")
    max_steps: int | None = _data(1000, "stop after this many steps in all", whole_number(1), metavar="N")

    optimizer: str = _optimizer("adamw", choices=OPTIMIZERS)
    lr: float | None = _optimizer(1e-3, "at its highest", number(above=True), metavar="RATE")
    schedule: str = _optimizer("cosine:warmup=100", 'of the rate, e.g. "constant"', metavar="TEXT")
    clip_norm: float | None = _optimizer(
        None, "largest norm of all gradients together, after averaging; default: 1, but none with demo",
        number(above=True), metavar="N",
    )  # fmt: skip

    eval: bool = _output(True, "measure the loss on held-out text after each epoch and at the end")
    sample: int | None = _output(
        None, "characters that the model writes at the end; default: 256, none while they are noise", whole_number(),
        metavar="N",
    )  # fmt: skip
    prompt: str = _output("\n", "the text that these go on from")
    temperature: float = _output(
        0.8, "below 1 favours likely characters; 0: always the likeliest", number(), metavar="T"
    )

    def check(self) -> None:
        super().check()
        if self.clip_norm is None and not self.averages_signs:
            object.__setattr__(self, "clip_norm", 1.0)
        if self.width % self.heads:
            raise ArgumentError(f"--heads: expected a number that divides --width {self.width}, got {self.heads}")
        if self.dropout >= 1:
            raise ArgumentError(f"--dropout: expected a share from 0 to below 1, got {self.dropout:g}")
        if self.heads % self.tp:
            raise ArgumentError(f"--tp: expected a number that divides --heads {self.heads}, got {self.tp}")
        if self.tp > 1 and self.elastic:
            raise ArgumentError("--tp: expected no --elastic with it, as no other rank has a lost one's part")
        if self.tp > 1 and self.logical_shards:
            raise ArgumentError("--tp: expected no --logical-shards with it, as its sums follow its own ranks")
        if self.tp > 1 and self.audit_every:
            raise ArgumentError("--tp: expected no --audit-every with it, as no other rank has a rank's part")
        if self.tp > 1 and self.policy != "none":
            raise ArgumentError("--tp: expected no --policy with it, as its steps are those of whole models")
        if self.tp > 1 and self.balance == "auto":
            raise ArgumentError("--tp: expected no --balance auto with it, as ranks of a layer have the same batches")
        self._check_pipeline()
        if self.sample != 0 and not self.prompt:
            raise ArgumentError("--prompt: expected at least one character, got none")

    def _check_pipeline(self) -> None:
        """Raise ArgumentError for what does not fit stages, and choose their micro-batches."""
        if self.pp == 1:
            if self.micro_batches is not None or self.pp_schedule != ONE_F_ONE_B:
                option = "--pp-schedule" if self.micro_batches is None else "--micro-batches"
                raise ArgumentError(f"{option}: needs --pp with 2 stages or more")
            return
        for option, (is_given, reason) in self._refused_by_stages().items():
            if is_given:
                raise ArgumentError(f"--pp: expected no {option} with it, as {reason}")
        if self.micro_batches is None:
            object.__setattr__(self, "micro_batches", self._usual_micro_batches())
        if self.batch_size % self.batch_parts:
            raise ArgumentError(
                f"--micro-batches: expected a number that divides --batch-size {self.batch_size}, got "
                f"{self.micro_batches}"
            )
        if self.pp_schedule == INTERLEAVED and self.batch_parts % self.pp:
            raise ArgumentError(
                f"--pp-schedule interleaved: expected micro-batches that --pp {self.pp} divides, which divide "
                f"--batch-size {self.batch_size}, got {self.micro_batches}"
            )
        if self.overlap == "auto":
            object.__setattr__(self, "overlap", "off")

    def _refused_by_stages(self) -> dict[str, tuple[bool, str]]:
        """Return which options are given that a pipeline does not have, and why."""
        alone = "no other rank has a lost one's stage"
        return {
            "--elastic": (self.elastic, alone),
            "--logical-shards": (bool(self.logical_shards), "its sums follow its own ranks"),
            "--audit-every": (bool(self.audit_every), "no other rank has a rank's stage"),
            "--policy": (self.policy != "none", "its steps are those of whole models"),
            f"--compression {self.compression}": (
                self.compression not in ("none", "fp16", "bf16"),
                "its codes look at a rank's numbers alone, and the embedding is on two",
            ),
            f"--zero {self.zero}": (self.zero > 1, "several backwards add up in a step; --zero 1 goes with it"),
            "--overlap on": (self.overlap == "on", "several backwards add up in a step"),
            "--balance auto": (self.balance == "auto", "the ranks of a pipeline have the same batches"),
            "--uneven-inputs join": (self.uneven_inputs == "join", "all micro-batches have the same size"),
            "--dropout": (self.dropout > 0, "each stage would draw other numbers than one rank"),
            "--summary": (self.summary, "no rank has the whole model"),
        }

    def _usual_micro_batches(self) -> int:
        """Return the fewest micro-batches, from twice the stages up, that divide the batch, else one a window."""
        step = self.pp if self.pp_schedule == INTERLEAVED else 1
        fitting = range(2 * self.pp, self.batch_size + 1, step)
        return next((n for n in fitting if self.batch_size % n == 0), self.batch_size)

    @property
    def batch_parts(self) -> int:
        return self.micro_batches or 1


def presets(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the options of known runs, by the name of each, for a number of ranks, which divide a step's windows.

    nanogpt-cpu: nanoGPT's run for computers without a GPU, 12 windows a step: a loss of 1.88 on tiny Shakespeare. The
    rate falls more slowly than there, with biases and Adam's own beta2.
    Source: https://github.com/karpathy/nanoGPT, README ("I only have a macbook") and configuration of that run.
    """
    return {
        "nanogpt-cpu": {
            "layers": 4, "width": 128, "heads": 4, "context": 64, "batch_size": -(-12 // ranks), "max_steps": 2000,
            "epochs": 4, "lr": 1e-3, "schedule": "cosine:warmup=100,floor=0.1,steps=2600", "weight_decay": 0.1,
        }
    }  # fmt: skip
