"""One run that trains a GPT on a text, and what it writes at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.engine import RandomStream
from clcomm.parallel import Mesh
from clcomm.parallel.mesh import in_words
from training.data.datasets import Splits
from training.data.text import TextDataset, open_text
from training.engines.gpt import Stages, gpt_parts
from training.engines.parts import Parts, Placement
from training.result import Result
from training.session import Session
from training.start import start
from training.text_options import TextOptions

if TYPE_CHECKING:
    from rich.console import Console

#: Characters of a sample, and of a piece of it.
SAMPLE, _PIECE = 256, 16


class TextSession(Session):
    """One training run of a GPT; creating one is collective.

    Args:
        comm: the ranks; None: the session joins those of the job.
        console: where rank 0 prints; None: a new one.
    """

    EVALUATION_BATCH: ClassVar[int] = 16
    options: TextOptions

    def __init__(self, options: TextOptions, comm: Communicator | None = None, console: Console | None = None):
        comm = comm or start(options)
        axes = {name: size for name, size in (("pp", options.pp), ("tp", options.tp)) if size > 1}
        ranks = options.pp * options.tp  # of a model
        if comm.size % ranks:
            given = " ".join(f"--{name} {size}" for name, size in axes.items())
            raise ArgumentError(f"{given}: expected a number of ranks that {ranks} divides, got {comm.size}")
        self._mesh = Mesh(comm, dp=-1, **axes) if axes else None
        super().__init__(options, comm, console=console)

    @property
    def replicas(self) -> Communicator:
        return self.comm if self._mesh is None else self._mesh["dp"]

    @property
    def axis(self) -> str:
        return super().axis if self._mesh is None else in_words(self._mesh.coordinates)

    def _open_splits(self) -> Splits:
        splits = open_text(self.options.text, self.options.context, self.comm)
        train = splits.train
        self.say(f"text: {splits.name}; {train.images.size:,} characters of {train.classes} kinds")
        return splits

    def _build_parts(self) -> Parts:
        options, comm = self.options, self.comm
        device = Placement(options.device, comm.local_rank, comm.local_size, comm.cores).opencl()
        tp = None if self._mesh is None or options.tp == 1 else self._mesh["tp"]
        stages = None
        if self._mesh is not None and options.pp > 1:
            stages = Stages(self._mesh["pp"], options.batch_parts, options.pp_schedule)
        RandomStream.of(device).seed(options.seed, comm.rank)
        return gpt_parts(
            device, options.seed, self.splits.train.classes, options.context, tp, stages,
            layers=options.layers, width=options.width, heads=options.heads, tied=options.tied_head,
            dropout=options.dropout,
            recompute=options.recompute,
        )  # fmt: skip

    def _described_samples(self) -> int:
        """Return one: the layers are the same, and more would take more memory than a step that has ended."""
        return 1

    def headline(self) -> str:
        line = super().headline()
        if self._mesh is not None:
            line += f"; {in_words(self._mesh.shape)}"
        if self.parts.pipeline is not None:
            schedule = self.parts.pipeline.schedule
            line += f"; {schedule.stages} stages, {schedule.micro_batches} micro-batches, {schedule.name}"
        return line

    def result_line(self, result: Result) -> str:
        """Return a run's figures as one line of text."""
        parts = [f"{result.steps} steps", f"training loss {result.train_loss:.4f}"]
        if result.evaluation is not None:
            parts.append(f"held-out loss {result.evaluation.loss:.4f}")
        parts.append(f"{result.images_per_s * self.options.context:,.0f} characters/s")
        parts.append(f"step p50 {result.step_p50_s * 1e3:.1f} ms, p95 {result.step_p95_s * 1e3:.1f} ms")
        if result.pipeline is not None and result.pipeline["bubble"] is not None:
            parts.append(f"bubble {result.pipeline['bubble']:.0%}")
        return "; ".join(parts)

    def print_sample(self) -> None:
        """Print --prompt and what the model writes after it, the same for a seed; collective.

        All ranks meet after a few characters, so that none waits for long. Raises DataError for a prompt with
        characters that are not in the text.
        """
        options, train = self.options, self.splits.train
        assert isinstance(train, TextDataset)
        length = self._sample_length(train)
        if not length:
            return
        tokens = train.vocabulary.encode(options.prompt).tolist()
        random = np.random.Generator(np.random.Philox(options.seed))
        self.console.print(f"sample:\n{options.prompt}", highlight=False, markup=False, end="")
        with self.trainer.sync.full_parameters(self.parts.model):
            for written in range(0, length, _PIECE):
                for _ in range(min(_PIECE, length - written) if self.replicas.rank == 0 else 0):  # one replica runs
                    seen = np.array([tokens[-options.context :]], np.int32)
                    tokens.append(drawn_token(self.parts.predict(seen)[0, -1], options.temperature, random.random()))
                piece = train.vocabulary.decode(np.array(tokens[len(options.prompt) + written :], np.int32))
                self.console.print(piece, highlight=False, markup=False, end="")
                self.comm.rendezvous()
        self.console.print()

    def _sample_length(self, train: TextDataset) -> int:
        """Return the characters to write: --sample; by default none while they would be noise."""
        if self.options.sample is not None:
            return self.options.sample
        own = self._evaluation.loss if self._evaluation else self.trainer.train_loss
        loss, guessed = self.comm.broadcast_object(own, label="metrics"), train.loss_of_pairs()
        if loss < guessed:
            return SAMPLE
        self.say(
            f"no sample: the loss of {loss:.2f} is not below {guessed:.2f}, that of guessing each character by the one "
            f"before it; more steps have one, or --sample {SAMPLE}"
        )
        return 0


def drawn_token(logits: np.ndarray, temperature: float, chance: float) -> int:
    """Return the token at `chance`, from 0 to 1, of the distribution softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits.argmax())
    powers = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    sums = powers.cumsum()
    return int(min(np.searchsorted(sums, chance * sums[-1], side="right"), len(logits) - 1))
