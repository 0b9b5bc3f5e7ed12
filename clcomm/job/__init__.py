"""Start, stalls and end of a job's processes: exit codes, watchdogs, and one message for each failure."""

from clcomm.job.endings import note_saved, note_step, run

__all__ = ["note_saved", "note_step", "run"]
