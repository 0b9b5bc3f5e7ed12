"""Chains of operations on elements that run as one kernel: forward, and backward by computing them again.

`tracing.py` runs a function on symbols and lists the launches that it would queue, backward's too; `stages.py` makes
one kernel of those that follow each other; `function.py` has the decorator.
"""

from clcomm.engine.fusion.function import Fused as Fused
from clcomm.engine.fusion.function import chained as chained
from clcomm.engine.fusion.function import fused as fused
from clcomm.engine.fusion.function import one_by_one as one_by_one
