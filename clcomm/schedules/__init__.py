"""The all-reduces of textbooks as lists of messages: who sends what to whom in which round; arithmetic alone."""

from clcomm.schedules.all_reduce import ALGORITHMS, schedule_of
from clcomm.schedules.schedule import Schedule, Transfer

__all__ = ["ALGORITHMS", "Schedule", "Transfer", "schedule_of"]
