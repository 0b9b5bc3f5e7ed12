"""Start, stalls and end of a job's processes: exit codes, watchdogs, and one message for each failure."""

from clcomm.job.endings import note_saved, note_step, run
from clcomm.stats.now import note_samples

__all__ = ["note_samples", "note_saved", "note_step", "run"]
