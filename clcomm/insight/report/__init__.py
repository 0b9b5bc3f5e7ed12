"""Reports of runs: records of a run's figures, and the output of `clcomm report` and `clcomm compare`.

record.py gathers and writes a run's figures. recording.py reads such files, which schema.py checks. report.py builds
the tables, charts and sentences as plain data; formats.py and insight/drawing/svg.py render them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clcomm.insight.report.record import gather_records, run_document, write_document
    from clcomm.insight.report.recording import Run, read_runs
    from clcomm.insight.report.report import Report, build

__all__ = ["Report", "Run", "build", "gather_records", "read_runs", "run_document", "write_document"]

#: The module of each name, imported at first access: a job writes its figures without the renderers.
_MODULES = {
    "Report": "report", "Run": "recording", "build": "report", "gather_records": "record", "read_runs": "recording",
    "run_document": "record", "write_document": "record",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clcomm.insight.report' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"clcomm.insight.report.{_MODULES[name]}"), name)
    return value
