"""A model's layers, arithmetic and buckets: `summarize(model, (1, 3, 32, 32)).table()`."""

from clcomm.insight.summary.model_summary import Layer, ParameterPlace, Summary
from clcomm.insight.summary.summarize import summarize

__all__ = ["Layer", "ParameterPlace", "Summary", "summarize"]
