"""Reports of runs: what a run writes down, and what `clcomm report` and `clcomm compare` show of it.

record.py gathers and writes a run's figures. reading.py reads such files, which schema.py checks. report.py builds the
tables, charts and sentences as plain data; html.py, terminal.py, text_formats.py and png.py render them.
"""

from clcomm.report.reading import Run, read_runs
from clcomm.report.record import gather_records, run_document, write_document
from clcomm.report.report import Report, build

__all__ = ["Report", "Run", "build", "gather_records", "read_runs", "run_document", "write_document"]
