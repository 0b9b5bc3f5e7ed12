"""Train a GPT on characters of a text, data-parallel: `mpiexec -n 4 python -m examples.gpt`.

Without mpiexec it runs as a world of one. The text is that of Python's standard library, or of `--text FILE`. At the
end it prints the result, where the time went, and what the model writes once it has learned something.
"""

from __future__ import annotations

from clcomm import run
from clcomm.comm.transport.mpi_failures import place_in_world
from training.command_line import parse
from training.end_of_run import train
from training.text_options import TextOptions, presets
from training.text_session import TextSession


def main() -> int:
    description = "Train a GPT on characters of a text, data-parallel over MPI."
    options = parse("examples.gpt", description, TextOptions, presets(place_in_world()[1]))
    session = TextSession(options)
    train(session)
    session.print_sample()
    return 0


if __name__ == "__main__":
    run(main)
