"""All functions of tensors in one module, usually imported as F.

registry.py lists them; functional.pyi has their types.
"""

import sys

from clcomm.engine import registry
from clcomm.engine.tensor import Tensor

__all__ = sorted([each.name for each in registry.entries()])
# A tensor's operators call these functions; tensor.py cannot import this module, which imports it.
Tensor._functional = sys.modules[__name__]  # type: ignore[misc]
globals().update(registry.functions())
