"""The options of a training job, given on the command line or by a program as keyword arguments."""

from __future__ import annotations

import importlib.util
from argparse import ArgumentTypeError
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from clcomm.base.console.option_types import number, place, whole_number
from clcomm.base.errors import ArgumentError, pip_install
from clcomm.base.flat_space.parameters import PRECISIONS
from clcomm.base.units import parse_size
from clcomm.insight.trace.part_file import DEFAULT_LIMIT
from clcomm.sync.divergence import ON_DIVERGENCE
from training.data.choose import CHOICES as DATA_CHOICES
from training.option_conflicts import refuse_conflicts, refuse_other_sums
from training.option_fields import Options, declared, option_group, size

ENGINES = ("native", "netcl", "torch")
MODELS = ("convnet", "mlp", "lenet", "resnet")
_OF_NETCL = ("convnet", "mlp")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")
#: The largest seed that all random generators accept.
MOST_SEED = 2**63 - 1
#: Learning rates that train the two models well at the default batch size.
DEFAULT_LR = {"sgd": 0.05, "adam": 2e-3, "adamw": 2e-3, "rmsprop": 1e-3}


def default_rates() -> str:
    """Return the default learning rates as text: "0.05 for sgd, 0.002 for adam and adamw"."""
    optimizers: dict[float, list[str]] = {}
    for optimizer, rate in DEFAULT_LR.items():
        optimizers.setdefault(rate, []).append(optimizer)
    return ", ".join(f"{rate:g} for {' and '.join(names)}" for rate, names in optimizers.items())


def _share(value: Any) -> float:
    found = number(above=True)(value)
    if found > 100:
        raise ArgumentTypeError(f"expected a share such as 0.98 or a percentage such as 98, got {value!r}")
    return found / 100 if found > 1 else found


_data = option_group("model and data")
_optimizer = option_group("optimizer")
_communication = option_group("communication")
_output = option_group("evaluation and output")
_trace = option_group("trace")
_checkpoint = option_group("checkpoints")
_log = option_group("logs")
_failure = option_group("when ranks fail")


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    """The options that every training job has; raises ArgumentError if a value or a combination is not allowed."""

    USUAL: ClassVar[tuple[str, ...]] = (
        "model", "device", "data", "batch_size", "epochs", "max_steps", "logical_shards", "optimizer", "lr",
        "bucket_size", "report", "checkpoint", "resume",
    )  # fmt: skip

    model: str = _data("convnet", choices=MODELS)
    engine: str = _data("native", "whose kernels run", choices=ENGINES)
    device: str | None = _data(
        None,
        '"gpu", "gpu:1", "cpu" or part of a name; default: $CLCOMM_DEVICE, else a GPU, else the CPU',
        metavar="NAME",
    )
    data: str = _data("auto", f"{', '.join(DATA_CHOICES)} or a directory of IDX files", metavar="NAME|DIR")
    augment: bool = _data(False, "shift and mirror training images at random, anew in each epoch")
    sharding: str = _data(
        "interleaved", "which samples a rank gets: every N-th of one shuffled order, or an unbroken block",
        choices=("interleaved", "contiguous"),
    )  # fmt: skip
    uneven_inputs: str = _data(
        "pad", "where ranks don't divide the samples: repeat some, or let ranks with fewer wait for none",
        choices=("pad", "join"),
    )  # fmt: skip
    balance: str = _data(
        "off", "divide each step's samples by the ranks' measured speed (auto), or evenly", choices=("off", "auto")
    )
    batch_size: int = _data(32, "a rank's", whole_number(1), metavar="N")
    epochs: int | None = _data(None, "default: 1 for MNIST, 40 for the small digits", whole_number(1), metavar="N")
    max_steps: int | None = _data(None, "stop after this many steps in all", whole_number(1), metavar="N")
    seed: int = _data(0, "of parameters and order", whole_number(most=MOST_SEED), metavar="N")

    optimizer: str = _optimizer("sgd", choices=OPTIMIZERS)
    lr: float | None = _optimizer(None, f"default: {default_rates()}", number(above=True), metavar="RATE")
    momentum: float = _optimizer(0.9, "of sgd and rmsprop", number(), metavar="M")
    nesterov: bool = _optimizer(False, "Nesterov's momentum, with sgd")
    weight_decay: float | None = _optimizer(None, "default: the optimizer's", number(), metavar="W")
    clip_norm: float | None = _optimizer(
        None, "largest norm of all gradients together, after averaging", number(above=True), metavar="N"
    )
    schedule: str = _optimizer("cosine:warmup=40", 'of the rate, e.g. "constant" or "cosine:warmup=40"', metavar="TEXT")
    sharded_optimizer: bool = _optimizer(
        False, "each rank updates a part of the parameters and keeps that part's optimizer state (ZeRO stage 1)"
    )
    zero: int = _optimizer(
        0, "what ranks divide: the optimizer's state (1), gradients too (2), parameters too (3); 0: nothing",
        whole_number(most=3), metavar="STAGE",
    )  # fmt: skip
    precision: str = _optimizer(*declared("precision"), choices=tuple(PRECISIONS))
    loss_scaling: bool = _optimizer(
        False, "find a scale for losses at which gradients do not overflow, and skip steps where one does; always "
        "with fp16",
    )  # fmt: skip
    grad_accumulation: int = _optimizer(1, "micro-batches a step", whole_number(1), metavar="N")

    bucket_size: int | str = _communication("1MiB", declared("bucket_size")[1], size, metavar="SIZE|auto")
    no_bucketing: bool = _communication(False, "reduce each tensor on its own")
    first_bucket_size: int | str | None = _communication(*declared("first_bucket_size"), size, metavar="SIZE")
    split_tensors: bool = _communication(*declared("split_tensors"))
    overlap: str = _communication(
        "auto", "reduce buckets while backward goes on; auto: if that is faster in the first steps",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    transport: str = _communication("auto", "how arrays travel", choices=("auto", "shared", "mpi"))
    compression: str = _communication(*declared("compression"), metavar="SCHEME")
    policy: str = _communication(*declared("policy"), metavar="POLICY")
    check_finite: bool = _communication(*declared("check_finite"))
    check_replicas: int = _communication(*declared("check_replicas_every"), whole_number(), metavar="K")
    on_divergence: str = _communication(*declared("on_divergence"), choices=ON_DIVERGENCE)

    eval: bool = _output(True, "measure test accuracy at the end")
    target_accuracy: float | None = _output(
        None, "exit with code 3 below this test accuracy, e.g. 0.98 or 98", _share, metavar="A"
    )
    report: str | None = _output(None, "write the run's figures as JSON", metavar="FILE")
    quiet: bool = _output(False, "no progress and no tables, only the result")

    trace: str | None = _trace(None, "write a timeline of all ranks, for ui.perfetto.dev", metavar="FILE")
    trace_every: int = _trace(1, "one step of N", whole_number(1), metavar="N")
    trace_limit: int | str = _trace(
        DEFAULT_LIMIT, "of that file before compression; recording ends there", size, metavar="SIZE"
    )

    def check(self) -> None:
        if self.nesterov and (self.optimizer != "sgd" or self.momentum <= 0):
            raise ArgumentError("--nesterov: needs --optimizer sgd and a --momentum above 0")
        if self.zero_stage and self.engine != "native":
            raise ArgumentError(f"{self.sharded_by}: needs --engine native, got {self.engine}")
        if self.engine == "netcl" and self.model not in _OF_NETCL:
            raise ArgumentError(f"--model {self.model}: needs --engine native or torch, got netcl")
        refuse_conflicts(self)
        if self.target_accuracy is not None and not self.eval:
            raise ArgumentError("--target-accuracy: needs the evaluation that --no-eval leaves out")
        if self.trace:
            parse_size(self.trace_limit, "--trace-limit")

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 without a sharded update: that of --zero, and 1 with --sharded-optimizer alone."""
        return self.zero or int(self.sharded_optimizer)

    @property
    def sharded_by(self) -> str:
        """The option that divides the update."""
        return f"--zero {self.zero}" if self.zero else "--sharded-optimizer"

    @property
    def scales_losses(self) -> bool:
        """Whether the loss is scaled: with --loss-scaling, and with --precision fp16."""
        return self.loss_scaling or self.precision == "fp16"

    @property
    def learning_rate(self) -> float:
        """--lr, by default the optimizer's of DEFAULT_LR."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def averages_signs(self) -> bool:
        """Whether --compression leaves signs in the place of gradients, as large as ever after any step."""
        return self.compression.startswith("demo:")

    def settings(self) -> dict[str, Any]:
        """Return all options but those of the run's outputs, by name, for its report."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OUTPUTS}
        return {**given, "lr": self.learning_rate}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(JobOptions):
    """The options of one training run, such as `TrainingOptions(model="mlp", epochs=1)`.

    Attributes:
        SAMPLES: what a sample is, in the plural.
        ALSO_SHARED: settings, besides those of every run, that a resumed run shares with the one it goes on from.
    """

    SAMPLES: ClassVar[str] = "images"
    ALSO_SHARED: ClassVar[tuple[str, ...]] = ()

    checkpoint: str | None = _checkpoint(None, "save there after each epoch and at the end", metavar="FILE")
    checkpoint_every: int | None = _checkpoint(None, "also save every N steps", whole_number(1), metavar="N")
    checkpoint_keep: int = _checkpoint(
        2, "of the last checkpoints: the newest is FILE, the one before it FILE.1", whole_number(1), metavar="N"
    )
    resume: str | None = _checkpoint(
        None, "go on from this checkpoint; default: --checkpoint's file", metavar="FILE", nargs="?", const=""
    )

    summary: bool = _log(False, "show the model's layers, their cost, their buckets")
    log_csv: str | None = _log(None, "write a row for each step: loss, times, images/s, accuracy", metavar="FILE")
    tensorboard: str | None = _log(None, "write the same for TensorBoard (needs clcomm[tensorboard])", metavar="DIR")
    metrics_port: str | None = _log(
        None, "serve each rank's figures to Prometheus, at this port and those after it, to this host alone without an "
        "address (needs clcomm[prometheus])", place, metavar="[ADDRESS:]PORT",
    )  # fmt: skip
    metrics_textfile: str | None = _log(
        None, "write them for node exporter's textfile collector (needs clcomm[prometheus])", metavar="DIR"
    )
    otlp: str | None = _log(
        None, "send them, and spans, to an OpenTelemetry collector such as http://localhost:4318 (needs clcomm[otlp])",
        metavar="URL",
    )  # fmt: skip
    wandb: str | None = _log(
        None, "keep rank 0's figures for Weights & Biases, offline (needs clcomm[wandb])", metavar="DIR"
    )

    logical_shards: int | None = _data(
        None, "cut each step into N shards of --batch-size samples, which the ranks share out: the same bits on any "
        "number of ranks up to N", whole_number(1), metavar="N",
    )  # fmt: skip

    audit_every: int = _failure(
        0, "at every N-th step another rank computes each rank's batch too: a fault is named with its rank and "
        "parameter; see docs/robustness.md", whole_number(), metavar="N",
    )  # fmt: skip
    memory_checkpoint_every: int | None = _failure(
        None, "where clcomm run replaces ranks, copy the state to memory every N steps; default: in 2%% of the time",
        whole_number(1), metavar="N",
    )  # fmt: skip
    elastic: bool = _failure(
        False, "go on with the ranks that are left; needs Open MPI with ULFM; see docs/robustness.md"
    )

    def check(self) -> None:
        super().check()
        if self.elastic and (self.zero_stage or self.sharding != "interleaved"):
            raise ArgumentError(
                f"--elastic: needs --sharding interleaved and no {self.sharded_by if self.zero_stage else '--zero'}"
            )
        if self.elastic and self.trace:
            raise ArgumentError(
                "--elastic: expected no --trace with it, which is one file of all ranks; use one of the two"
            )
        refuse_other_sums(self)
        if self.otlp and not self.otlp.startswith(("http://", "https://")):
            raise ArgumentError(
                f"--otlp: expected a collector's address such as http://localhost:4318, got {self.otlp!r}"
            )
        for option, (package, extra) in _EXPORTERS.items():
            if getattr(self, option) and importlib.util.find_spec(package) is None:
                name = f"--{option.replace('_', '-')}"
                raise ArgumentError(f"{name}: needs {package}, which is not installed; {pip_install(extra)}")
        if self.resume == "" and not self.checkpoint:
            raise ArgumentError("--resume: expected a file, here or with --checkpoint")
        if self.checkpoint_every and not self.checkpoint:
            raise ArgumentError("--checkpoint-every: needs --checkpoint FILE to say where")

    @property
    def batch_parts(self) -> int:
        """The number of equal parts of each batch."""
        return 1

    @property
    def exports(self) -> bool:
        """Whether a rank's figures go to an exporter."""
        return any(getattr(self, option) for option in _EXPORTERS)

    @property
    def resume_from(self) -> str | None:
        """The file that --resume names, or without a name --checkpoint's; None: do not resume."""
        return self.checkpoint if self.resume == "" else self.resume


#: What the exporters' options need, and the extra that brings it.
_EXPORTERS = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "metrics_port": ("prometheus_client", "prometheus"),
    "metrics_textfile": ("prometheus_client", "prometheus"),
    "otlp": ("opentelemetry", "otlp"),
    "wandb": ("wandb", "wandb"),
}
#: Options of a run's outputs, and of a comparison; they do not affect a run itself.
_OUTPUTS = (
    "report", "plot", "quiet", "log_csv", *_EXPORTERS, "summary", "trace", "checkpoint", "resume", "variants",
)  # fmt: skip
