"""Pipeline parallel: the layers of a model divided between ranks, which work on micro-batches at the same time."""

from clcomm.parallel.pipeline.executor import Bubble
from clcomm.parallel.pipeline.pipeline import Pipeline
from clcomm.parallel.pipeline.plan import measured_costs

__all__ = ["Bubble", "Pipeline", "measured_costs"]
