"""Schedules: the messages of textbook all-reduces, and the work of a pipeline; arithmetic alone."""

from clcomm.base.schedules.all_reduce import ALGORITHMS, Schedule, Transfer, schedule_of

__all__ = ["ALGORITHMS", "Schedule", "Transfer", "schedule_of"]
