"""What a training job can be told on its command line."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from clcomm.compression import parse_compression
from clcomm.divergence import ON_DIVERGENCE
from clcomm.errors import ArgumentError
from clcomm.option_types import OneLineParser, number, whole_number
from clcomm.same_start import declare
from clcomm.trace.recorder import DEFAULT_LIMIT
from clcomm.transport.mpi import place_in_world
from clcomm.units import parse_size
from training.data_source import CHOICES as DATA_CHOICES

ENGINES = ("native", "netcl", "torch")
MODELS = ("convnet", "mlp")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")
#: The largest number that all generators of random numbers take.
MOST_SEED = 2**63 - 1
#: Learning rates that train the two models well at the default batch size; --lr overrides them.
DEFAULT_LR = {"sgd": 0.05, "adam": 2e-3, "adamw": 2e-3, "rmsprop": 1e-3}


def default_rates() -> str:
    """Return the learning rates in words: "0.05 for sgd, 0.002 for adam and adamw"."""
    optimizers: dict[float, list[str]] = {}
    for optimizer, rate in DEFAULT_LR.items():
        optimizers.setdefault(rate, []).append(optimizer)
    return ", ".join(f"{rate:g} for {' and '.join(names)}" for rate, names in optimizers.items())


class Parser(OneLineParser):
    """The parser of a training job."""

    def print_help(self, file: Any = None) -> None:
        """Print the options, once for all ranks."""
        if place_in_world()[0] == 0:
            super().print_help(file)


def parser(program: str, description: str) -> Parser:
    """Return a parser with the options that every training job has."""
    result = Parser(prog=f"python -m {program}", description=description, allow_abbrev=False)
    _add_model_options(result)
    _add_optimizer_options(result)
    _add_communication_options(result)
    _add_output_options(result)
    return result


def _add_model_options(parser: Parser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--model", choices=MODELS, default="convnet", help="default: %(default)s")
    group.add_argument("--engine", choices=ENGINES, default="native", help="whose kernels run; default: %(default)s")
    group.add_argument(
        "--device",
        metavar="NAME",
        help='"gpu", "gpu:1", "cpu" or part of a name; default: $CLCOMM_DEVICE, a GPU, the CPU',
    )
    group.add_argument(
        "--data", default="auto", metavar="NAME|DIR", help=f"{', '.join(DATA_CHOICES)} or a directory of IDX files"
    )
    group.add_argument(
        "--sharding", choices=("interleaved", "contiguous"), default="interleaved",
        help="which samples a rank gets: every N-th of one shuffled order, or an unbroken block; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--uneven-inputs", choices=("pad", "join"), default="pad",
        help="samples that the ranks don't divide: some come twice, or ranks with fewer wait for none; "
        "default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=whole_number(1), default=32, metavar="N", help="a rank's; default: %(default)s"
    )
    group.add_argument(
        "--epochs", type=whole_number(1), metavar="N", help="default: 1 for MNIST, 40 for the small digits"
    )
    group.add_argument("--max-steps", type=whole_number(1), metavar="N", help="stop after so many steps in all")
    group.add_argument(
        "--seed",
        type=whole_number(most=MOST_SEED),
        default=0,
        metavar="N",
        help="of parameters and order; default: %(default)s",
    )


def _add_optimizer_options(parser: Parser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="default: %(default)s")
    group.add_argument("--lr", type=number(above=True), metavar="RATE", help=f"default: {default_rates()}")
    group.add_argument(
        "--momentum", type=number(), default=0.9, metavar="M", help="of sgd and rmsprop; default: %(default)s"
    )
    group.add_argument("--nesterov", action="store_true", help="Nesterov's momentum, with sgd")
    group.add_argument("--weight-decay", type=number(), metavar="W", help="default: the optimizer's")
    group.add_argument(
        "--clip-norm",
        type=number(above=True),
        metavar="N",
        help="largest norm of all gradients together, after averaging",
    )
    group.add_argument(
        "--schedule",
        default="cosine:warmup=40",
        metavar="TEXT",
        help='of the rate, e.g. "constant" or "cosine:warmup=40"; default: %(default)s',
    )
    group.add_argument(
        "--sharded-optimizer",
        action="store_true",
        help="each rank keeps the optimizer's state of a part of the parameters, and updates that part (ZeRO stage 1)",
    )
    group.add_argument(
        "--grad-accumulation",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="micro-batches a step; default: %(default)s",
    )


def _add_communication_options(parser: Parser) -> None:
    group = parser.add_argument_group("communication")
    group.add_argument(
        "--bucket-size",
        default="1MiB",
        metavar="SIZE|auto",
        help="of gradients reduced at a time; default: %(default)s",
    )
    group.add_argument("--no-bucketing", action="store_true", help="reduce each tensor on its own")
    group.add_argument(
        "--first-bucket-size", metavar="SIZE", help="of the first bucket, so that communication begins early"
    )
    group.add_argument("--split-tensors", action="store_true", help="cut tensors larger than the bucket size")
    group.add_argument(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="reduce buckets while backward goes on; auto: if that is faster in the first steps; default: %(default)s",
    )
    group.add_argument(
        "--transport", choices=("auto", "shared", "mpi"), default="auto", help="how arrays travel; default: %(default)s"
    )
    group.add_argument(
        "--compression",
        default="none",
        metavar="SCHEME",
        help="what gradients travel as: none, fp16, bf16, int8, topk:SHARE, powersgd:RANK; default: %(default)s",
    )
    group.add_argument("--check-finite", action="store_true", help="end with an error when a gradient holds NaN or Inf")
    group.add_argument(
        "--check-replicas",
        type=whole_number(),
        default=0,
        metavar="K",
        help="compare the replicas' hashes every K steps",
    )
    group.add_argument(
        "--on-divergence", choices=ON_DIVERGENCE, default="raise",
        help="where replicas differ: end with an error, or go on with what most ranks have; default: %(default)s",
    )  # fmt: skip


def _add_output_options(parser: Parser) -> None:
    group = parser.add_argument_group("evaluation and output")
    group.add_argument(
        "--eval", action=argparse.BooleanOptionalAction, default=True, help="measure test accuracy at the end"
    )
    group.add_argument(
        "--target-accuracy", type=_share, metavar="A", help="exit with code 3 below this test accuracy, e.g. 0.98 or 98"
    )
    group.add_argument("--report", metavar="FILE", help="write the run's figures as JSON")
    group.add_argument("--quiet", action="store_true", help="no progress and no tables, only what it came to")


def add_logging_options(parser: Parser) -> None:
    """Add the options of jobs that keep what happened step by step."""
    group = parser.add_argument_group("logs")
    group.add_argument("--summary", action="store_true", help="show the model's layers, their cost, their buckets")
    group.add_argument("--log-csv", metavar="FILE", help="write a row for each step: loss, times, images/s, accuracy")
    group.add_argument(
        "--tensorboard", metavar="DIR", help="write the same for TensorBoard (needs clcomm[tensorboard])"
    )


def add_checkpoint_options(parser: Parser) -> None:
    """Add the options of jobs that can stop and go on."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--checkpoint", metavar="FILE", help="save there after each epoch and at the end")
    group.add_argument(
        "--checkpoint-every", type=whole_number(1), metavar="STEPS", help="save every so many steps as well"
    )
    group.add_argument(
        "--checkpoint-keep", type=whole_number(1), default=2, metavar="N",
        help="of the last checkpoints: the newest is FILE, the one before it FILE.1; default: %(default)s",
    )  # fmt: skip
    group.add_argument(
        "--resume", nargs="?", const="", metavar="FILE", help="go on from this checkpoint; default: --checkpoint's file"
    )


def add_trace_options(parser: Parser) -> None:
    """Add the options of jobs that can record a timeline."""
    group = parser.add_argument_group("trace")
    group.add_argument("--trace", metavar="FILE", help="write a timeline of all ranks, for ui.perfetto.dev")
    group.add_argument(
        "--trace-every", type=whole_number(1), default=1, metavar="N", help="one step of N; default: %(default)s"
    )
    group.add_argument(
        "--trace-limit", default=DEFAULT_LIMIT, metavar="SIZE",
        help="of that file before compression; recording ends there; default: %(default)s",
    )  # fmt: skip


def add_elastic_option(parser: Parser) -> None:
    """Add the option of jobs that can go on with fewer ranks."""
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on with the ranks that are left when some die; needs Open MPI with ULFM; see README",
    )


def parse(parser: Parser) -> argparse.Namespace:
    """Return the checked options of this process's command line, which the ranks compare as they join.

    Raises ArgumentError.
    """
    options = parser.parse_args()
    declare(parser.prog, options)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raise ArgumentError where options contradict each other, and fill in what depends on others."""
    if options.lr is None:
        options.lr = DEFAULT_LR[options.optimizer]
    if options.nesterov and (options.optimizer != "sgd" or options.momentum <= 0):
        raise ArgumentError("--nesterov: needs --optimizer sgd and a --momentum above 0")
    if options.sharded_optimizer and options.engine != "native":
        raise ArgumentError(f"--sharded-optimizer: needs --engine native, got {options.engine}")
    parse_compression(options.compression)
    if options.split_tensors and options.compression != "none":
        raise ArgumentError("--split-tensors: expected no --compression with it, which wants whole tensors")
    if options.sharded_optimizer:
        _refuse_buckets(options)
    if options.uneven_inputs == "join" and options.overlap == "on":
        raise ArgumentError("--uneven-inputs join: expected no --overlap on with it; use one of the two")
    if getattr(options, "elastic", False) and (options.sharded_optimizer or options.sharding != "interleaved"):
        raise ArgumentError("--elastic: needs --sharding interleaved and no --sharded-optimizer")
    if getattr(options, "elastic", False) and getattr(options, "trace", None):
        raise ArgumentError(
            "--elastic: expected no --trace with it, which is one file of all ranks; use one of the two"
        )
    if options.target_accuracy is not None and not options.eval:
        raise ArgumentError("--target-accuracy: needs the evaluation that --no-eval leaves out")
    if getattr(options, "tensorboard", None) and importlib.util.find_spec("tensorboardX") is None:
        raise ArgumentError(
            "--tensorboard: needs tensorboardX, which is not installed; pip install 'clcomm[tensorboard]'"
        )
    if getattr(options, "trace", None):
        parse_size(options.trace_limit, "--trace-limit")
    if getattr(options, "resume", None) == "":
        if not options.checkpoint:
            raise ArgumentError("--resume: expected a file, here or with --checkpoint")
        options.resume = options.checkpoint
    if getattr(options, "checkpoint_every", None) and not options.checkpoint:
        raise ArgumentError("--checkpoint-every: needs --checkpoint FILE to say where")


def _refuse_buckets(options: argparse.Namespace) -> None:
    """Raise ArgumentError for what says how buckets are reduced: a sharded update has none."""
    given = {
        "--overlap on": options.overlap == "on",
        "--compression": options.compression != "none",
        "--no-bucketing": options.no_bucketing,
        "--first-bucket-size": options.first_bucket_size is not None,
        "--split-tensors": options.split_tensors,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ArgumentError(f"--sharded-optimizer: expected no {name} with it; use one of the two")


def _share(text: str) -> float:
    value = number(above=True)(text)
    if value > 100:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.98 or a percentage such as 98, got {text!r}")
    return value / 100 if value > 1 else value


#: Options that say where a run's output goes, and nothing about the run.
_OUTPUTS = (
    "report", "plot", "quiet", "log_csv", "tensorboard", "summary", "trace", "checkpoint", "resume", "variants",
)  # fmt: skip


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what decides about a run, by the options' names, for its report."""
    return {name: value for name, value in vars(options).items() if name not in _OUTPUTS}
