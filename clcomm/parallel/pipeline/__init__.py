"""Pipeline parallel: the layers of a model divided between ranks, which work on micro-batches at the same time."""

from clcomm.parallel.pipeline.pipeline import Pipeline
from clcomm.parallel.pipeline.plan import measured_costs
from clcomm.parallel.pipeline.times import Bubble

__all__ = ["Bubble", "Pipeline", "measured_costs"]
