"""Train a residual network on CIFAR-10, data-parallel: `mpiexec -n 4 python -m examples.cifar`.

Images are shifted and mirrored at random. Where CIFAR-10 is neither found nor downloaded, the network trains on
Fashion-MNIST or MNIST in the same shape. An epoch takes long on few cores: `--max-steps 100` shows the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

from clcomm import run
from clcomm.base.console.option_types import number
from training.command_line import parse
from training.data.choose import CHOICES
from training.end_of_run import train
from training.option_fields import option_group
from training.options import MODELS, TrainingOptions
from training.session import Session

_data = option_group("model and data")
_optimizer = option_group("optimizer")


@dataclass(frozen=True, kw_only=True)
class CifarOptions(TrainingOptions):
    """The options of one training run, with other defaults."""

    model: str = _data("resnet", choices=MODELS)
    data: str = _data("cifar", f"{', '.join(CHOICES)} or a directory of IDX files", metavar="NAME|DIR")
    augment: bool = _data(True, "shift and mirror training images at random, anew in each epoch")
    weight_decay: float | None = _optimizer(5e-4, "of the parameters", number(), metavar="W")


def main() -> int:
    options = parse("examples.cifar", "Train a residual network on CIFAR-10, data-parallel over MPI.", CifarOptions)
    return train(Session(options))


if __name__ == "__main__":
    run(main)
