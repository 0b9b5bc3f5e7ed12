"""Schedules: the messages of textbook all-reduces, and the work of a pipeline; arithmetic alone."""

from clcomm.base.schedules.all_reduce import ALGORITHMS, schedule_of
from clcomm.base.schedules.schedule import Schedule, Transfer

__all__ = ["ALGORITHMS", "Schedule", "Transfer", "schedule_of"]
