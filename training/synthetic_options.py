"""The options of a benchmark on random data."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Any

from clcomm.base.console.option_types import whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.parameters import PRECISIONS
from clcomm.sync.compression import parse_compression
from training.option_fields import Options, option_group, size
from training.options import MODELS

_model = option_group("model and data")
_run = option_group("measurement")
_communication = option_group("communication")


def image_shape(value: Any) -> tuple[int, int, int]:
    """Accept channels, height and width, such as "3x32x32" or (3, 32, 32)."""
    sizes = value.lower().split("x") if isinstance(value, str) else value
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 3:
        raise ArgumentTypeError(f"expected channels x height x width, such as 3x32x32, got {value!r}")
    channels, height, width = map(whole_number(1), sizes)
    return channels, height, width


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(Options):
    """The options of one benchmark, those of Horovod's and some more; raises ArgumentError for values that do not fit.

    A batch is one of images, or for "gpt" of sequences.
    """

    model: str = _model("resnet", choices=(*MODELS, "gpt"))
    engine: str = _model("native", "whose kernels run", choices=("native", "torch"))
    device: str | None = _model(None, '"gpu", "gpu:1", "cpu" or part of a name; default: as of the examples')
    image_shape: tuple[int, int, int] = _model("3x32x32", "of an image", image_shape, metavar="CxHxW")
    context: int = _model(256, "tokens of a sequence", whole_number(1), metavar="N")
    batch_size: int = _model(32, "a rank's", whole_number(1), metavar="N")

    num_warmup_batches: int = _run(10, "that do not count", whole_number(1), metavar="N")
    num_batches_per_iter: int = _run(10, "of an iteration", whole_number(1), metavar="N")
    num_iters: int = _run(10, "iterations, of which the mean and its spread are printed", whole_number(1), metavar="N")

    bucket_size: int | str = _communication("1MiB", "of gradients reduced at a time", size, metavar="SIZE")
    compression: str = _communication(
        "none",
        "what gradients travel as: none, fp16, bf16, int8, topk:SHARE, powersgd:RANK, demo:COUNT",
        metavar="SCHEME",
    )
    precision: str = _communication("float32", "what parameters are stored and sent in", choices=tuple(PRECISIONS))

    def check(self) -> None:
        parse_compression(self.compression)
        if self.engine == "torch" and self.model == "gpt":
            raise ArgumentError("--model gpt: needs --engine native, got torch")
        if self.engine == "torch" and self.precision != "float32":
            raise ArgumentError(f"--precision {self.precision}: needs --engine native, got torch")
