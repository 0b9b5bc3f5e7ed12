"""A tensor's methods that are the functions of their names.

registry.py lists and sets them; tensor_functions.pyi has their types.
"""

from __future__ import annotations

from typing import Generic

from clcomm.engine.tensor_shapes import AnyTensor


class FunctionMethods(Generic[AnyTensor]):
    """The methods of Tensor that have no text of their own: `x.exp()` is `functional.exp(x)`.

    One whose name ends with an underscore gives x itself the result of the function without it, see
    `functional.overwrite`.
    """

    __slots__ = ()
