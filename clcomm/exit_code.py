"""Exit codes: what a shell makes of one, and the code of the SystemExit that ends a program.

No hook of Python is told of that exception, but Python asks it for its code. So `SystemExit.code` is where one sees it,
however it was raised, and nothing about the exception changes.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any


def shell_code(code: int) -> int:
    """Return an exit code as a shell gets to see it, in 8 bits; a failure stays one where these are all 0."""
    return code & 0xFF or int(code != 0)


class _Code:
    """SystemExit's attribute `code`, which tells when the interpreter itself asks for it, from no frame of Python."""

    def __init__(self, original: Any, told: Callable[[SystemExit], object]):
        self._original, self._told = original, told

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> Any:
        if error is None:
            return self
        if sys._getframe().f_back is None:
            self._told(error)
            code = self._original.__get__(error)
            return shell_code(code) if isinstance(code, int) else code
        return self._original.__get__(error)

    def __set__(self, error: SystemExit, code: object) -> None:
        self._original.__set__(error, code)


def tell_of_the_last(told: Callable[[SystemExit], object]) -> None:
    """Call `told` with the SystemExit that ends the program, before its exit handlers run; CPython alone can.

    Up to Python 3.11 an exception that sys.exit() raised is none yet when the interpreter looks at it, so sys.exit()
    raises it here. (A `from sys import exit` before this call keeps Python's own.)
    """
    if sys.implementation.name != "cpython":
        return
    attributes = next(each for each in gc.get_referents(vars(SystemExit)) if isinstance(each, dict))
    attributes["code"] = _Code(attributes["code"], told)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    sys.exit = _exit


def _exit(code: Any = None, /) -> Any:
    """Raise SystemExit, as sys.exit() does."""
    raise SystemExit(code)
