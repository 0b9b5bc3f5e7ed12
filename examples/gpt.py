"""Train a GPT on characters of a text, data-parallel: `mpiexec -n 4 python -m examples.gpt`.

Without mpiexec it runs as a world of one. The text is that of Python's standard library, or of `--text FILE`. At the
end it prints the result, the communication, and what the model writes.
"""

from __future__ import annotations

from clcomm.job import run
from clcomm.report.record import write_document
from clcomm.transport.mpi_failures import place_in_world
from training.command_line import parse
from training.text_options import TextOptions, presets
from training.text_session import TextSession


def main() -> int:
    description = "Train a GPT on characters of a text, data-parallel over MPI."
    options = parse("examples.gpt", description, TextOptions, presets(place_in_world()[1]))
    session = TextSession(options)
    session.console.print(session.headline(), highlight=False)
    if options.summary:
        session.console.print(session.describe().table())
    result = session.run()
    comm, console = session.comm, session.console  # not those of the start if ranks were lost
    console.print(session.result_line(result), highlight=False)
    if comm.rank == 0 and not options.quiet:
        console.print(result.stats.table())
    if options.report:
        write_document(options.report, result.as_report(options, comm, session.splits.name), comm)
    if options.sample:
        with session.trainer.sync.full_parameters(session.parts.model):  # one replica alone runs the model
            text = session.write() if session.replicas.rank == 0 else ""
            if comm.rank == 0:
                console.print(f"sample:\n{text}", highlight=False, markup=False)
    comm.rendezvous()
    return 0


if __name__ == "__main__":
    run(main)
