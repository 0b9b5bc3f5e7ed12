"""The JSON objects of which reports are made, under their names."""

from __future__ import annotations

from typing import Any

#: A rank's record: its statistics, settings and figures, as `gather_records` returns them.
Record = dict[str, Any]
#: The file of a run, or of a comparison of runs.
Document = dict[str, Any]
