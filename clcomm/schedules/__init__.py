"""Schedules: the messages of textbook all-reduces, and the work of a pipeline; arithmetic alone."""

from clcomm.schedules.all_reduce import ALGORITHMS, schedule_of
from clcomm.schedules.schedule import Schedule, Transfer

__all__ = ["ALGORITHMS", "Schedule", "Transfer", "schedule_of"]
