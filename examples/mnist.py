"""Train a network on MNIST, data-parallel: `mpiexec -n 4 python -m examples.mnist`.

Without mpiexec it runs as a world of one. At the end it prints the result and where the time went.
"""

from __future__ import annotations

from clcomm import run
from training.command_line import parse
from training.end_of_run import train
from training.options import TrainingOptions
from training.session import Session


def main() -> int:
    options = parse("examples.mnist", "Train a network on MNIST, data-parallel over MPI.", TrainingOptions)
    return train(Session(options))


if __name__ == "__main__":
    run(main)
