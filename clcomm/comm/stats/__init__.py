"""Statistics of communication: events, counts and times, which add up exactly."""

from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.events import Collective, Observer, Phase

__all__ = ["Collective", "CommStats", "Observer", "Phase"]
