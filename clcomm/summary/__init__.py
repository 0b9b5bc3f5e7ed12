"""What a model consists of, what it costs, and where each gradient goes: `summarize(model, (1, 3, 32, 32)).table()`."""

from clcomm.summary.parts import Layer, ParameterPlace, Summary
from clcomm.summary.summarize import summarize

__all__ = ["Layer", "ParameterPlace", "Summary", "summarize"]
