"""Reports of runs: what a run writes down, and what `clcomm report` makes of it for people.

record.py gathers and writes a run's figures; reading.py reads such files, strictly, and puts them together; model.py
works out tables, charts and sentences as plain data; each of the other files writes these in one form.
"""

from clcomm.report.model import Report, build
from clcomm.report.reading import Run, read_runs
from clcomm.report.record import gather_records, run_document, write_document

__all__ = ["Report", "Run", "build", "gather_records", "read_runs", "run_document", "write_document"]
