"""Statistics of communication: events, counts and times, which add up exactly."""

from clcomm.stats.comm_stats import CommStats
from clcomm.stats.events import Collective, Observer, Phase

__all__ = ["Collective", "CommStats", "Observer", "Phase"]
