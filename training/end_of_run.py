"""A run on the console: what runs, and at its end the result and where the time went. `clcomm report` has the rest."""

from __future__ import annotations

from collections.abc import Iterator

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.insight.report.documents import Document
from clcomm.insight.report.record import write_document
from clcomm.sync.synchronizer import GRADIENTS, PARAMETERS
from training.result import missed_target
from training.session import Session

#: Exit code of a run that misses --target-accuracy.
TARGET_MISSED = 3
#: Characters of a whole step's bar, and the least share of a step that has a row.
_BAR, _LEAST_SHARE = 30, 0.01
_ELSE = "everything else"
_LEFT, _RIGHT = TextColumn("", right=False), TextColumn("")


def train(session: Session) -> int:
    """Train, print and write the results, and return the program's exit code; collective."""
    options = session.options
    session.say(session.headline())
    if options.summary:
        session.console.print(session.describe().table())
    result = session.run()
    comm, console = session.comm, session.console  # not those of the start if ranks were lost
    session.say(session.result_line(result))
    document = result.as_report(options, comm, session.splits.name)
    for table in tables(document) if comm.rank == 0 and not options.quiet else ():
        console.print(table)
    if options.report:
        write_document(options.report, document, comm)
    missed = missed_target(options, result.evaluation)
    if missed:
        console.print(missed, style="bold red", highlight=False)
    comm.rendezvous()
    return TARGET_MISSED if missed else 0


def tables(document: Document) -> Iterator[TextTable]:
    """Yield where a mean step goes, as the run's report says, and what a rank sent for gradients and for all else."""
    from clcomm.insight.report.elements import written  # here, as only rank 0 prints them
    from clcomm.insight.report.recording import Run
    from clcomm.insight.report.run_costs import Analysis
    from clcomm.insight.report.tables import step_table

    analysis = Analysis(Run(document, document["ranks"]))
    step = step_table(analysis)
    rows = [
        (row["part"], f"{written(row['mean_s'], 'ms')} ms", f"{row['share']:.0%}", "#" * round(_BAR * row["share"]))
        for row in step.rows if row["share"] >= _LEAST_SHARE
    ]  # fmt: skip
    if rows:
        yield TextTable([_LEFT, _RIGHT, _RIGHT, _LEFT], rows, title=f"{step.title}. {step.note}")
    sent: dict[str, list[float]] = {GRADIENTS: [0, 0, 0.0], PARAMETERS: [0, 0, 0.0], _ELSE: [0, 0, 0.0]}
    for row in analysis.counts["operations"]:
        total = sent.get(row["label"], sent[_ELSE])
        total[:] = [mine + row[key] for mine, key in zip(total, ("calls", "bytes", "seconds"), strict=True)]
    rows = [
        (name, f"{calls:,}", written(nbytes, "size"), f"{written(seconds, 'whole_ms')} ms")
        for name, (calls, nbytes, seconds) in sent.items() if calls
    ]  # fmt: skip
    yield TextTable(
        [_LEFT, *map(TextColumn, ("calls", "sent", "time"))], rows, title="Communication of a mean rank, in all.",
        note="--report FILE keeps all figures, clcomm report FILE shows them",
    )  # fmt: skip
