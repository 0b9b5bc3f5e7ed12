"""The rendezvous of kernels/fold.cl, interpreted from its source: each word that ranks share is a step of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycparser import c_ast, c_parser

import clcomm.engine
from tests.model_checker.course import ask
from tests.model_checker.memory import Words, at_address

SOURCE = Path(clcomm.engine.__file__).with_name("kernels") / "fold.cl"
_FUNCTIONS = (
    "reached", "polls_of", "all_reached", "note_arrivals", "meet", "any_asleep", "leaves_sleepers",
    "meet_fold_leave", "advance", "meet_and_share",
)  # fmt: skip
_CALL_WORDS = 32


class _Pointer(NamedTuple):
    """An address, or a variable."""

    address: Any
    name: str = ""


class _Return(Exception):
    pass


class Kernel:
    """The functions of fold.cl for some ranks.

    Args:
        ranks: ROWS.
        source: the file's text.
        call: the words of a call, private memory.
        rows: the ranks' rows, int64 in place of floats.
        out: the result.
    """

    def __init__(self, ranks: int, source: str, call: np.ndarray, rows: Sequence[Words], out: Words):
        self._functions, self._constants = _parsed(ranks, source)
        self._call, self._rows, self._out, self._ranks = call, rows, out, ranks
        self._call_at = call.ctypes.data

    def run(self, name: str, cells: Words) -> None:
        """Call `meet_fold_leave` or `meet_and_share`."""
        rows = [_Pointer(row.__array_interface__["data"][0]) for row in self._rows]
        last = [self._out.size] if name == "meet_and_share" else []
        addresses = self._call_at, cells.__array_interface__["data"][0], self._out.__array_interface__["data"][0]
        self._invoke(name, [*map(_Pointer, addresses), 1, *rows, *last])

    def _invoke(self, name: str, values: Sequence[Any]) -> Any:
        function = self._functions[name]
        names = [each.name for each in function.decl.type.args.params]
        variables = dict(zip(names, values, strict=True))
        try:
            self._do(function.body, variables)
        except _Return as end:
            return end.args[0]
        return None

    # --- statements ---

    def _do(self, node: Any, variables: dict[str, Any]) -> None:
        kind = type(node).__name__
        if kind == "Compound":
            for each in node.block_items or ():
                self._do(each, variables)
        elif kind == "Decl":
            variables[node.name] = 0 if node.init is None else self._value(node.init, variables)
        elif kind == "DeclList":
            for each in node.decls:
                self._do(each, variables)
        elif kind == "Return":
            raise _Return(None if node.expr is None else self._value(node.expr, variables))
        elif kind == "If":
            branch = node.iftrue if self._value(node.cond, variables) else node.iffalse
            if branch is not None:
                self._do(branch, variables)
        elif kind in ("While", "For"):
            if kind == "For":
                self._do(node.init, variables)
            while self._value(node.cond, variables):
                self._do(node.stmt, variables)
                if kind == "For":
                    self._value(node.next, variables)
        elif kind == "DoWhile":
            self._do(node.stmt, variables)
            while self._value(node.cond, variables):
                self._do(node.stmt, variables)
        elif kind != "EmptyStatement":
            self._value(node, variables)

    # --- expressions ---

    def _value(self, node: Any, variables: dict[str, Any]) -> Any:
        kind = type(node).__name__
        if kind == "Constant":
            return int(node.value.rstrip("L"))
        if kind == "ID":
            return variables[node.name] if node.name in variables else self._constants.get(node.name, node.name)
        if kind == "Cast":
            found = self._value(node.expr, variables)
            is_pointer = isinstance(node.to_type.type, c_ast.PtrDecl)
            return _Pointer(found) if is_pointer and not isinstance(found, _Pointer) else found
        if kind == "TernaryOp":
            return self._value(node.iftrue if self._value(node.cond, variables) else node.iffalse, variables)
        if kind == "BinaryOp":
            return self._binary(node, variables)
        if kind == "UnaryOp":
            return self._unary(node, variables)
        if kind == "ArrayRef":
            return self._load(self._place(node, variables), variables)
        if kind == "Assignment":
            value = self._value(node.rvalue, variables)
            place = self._place(node.lvalue, variables)
            if node.op in ("|=", "+="):
                before = self._load(place, variables)
                value = before | value if node.op == "|=" else before + value
            self._store(place, value, variables)
            return value
        assert kind == "FuncCall", kind
        return self._called(node.name.name, node.args.exprs if node.args else [], variables)

    def _binary(self, node: Any, variables: dict[str, Any]) -> Any:
        left = self._value(node.left, variables)
        if (node.op == "&&" and not left) or (node.op == "||" and left):
            return bool(left)
        right = self._value(node.right, variables)
        if isinstance(left, _Pointer):
            return _Pointer(left.address + 8 * right)
        return _OPERATIONS[node.op](left, right)

    def _unary(self, node: Any, variables: dict[str, Any]) -> Any:
        if node.op == "&":
            return _Pointer(variables, node.expr.name)
        if node.op == "*":
            return self._load(self._place(node, variables), variables)
        if node.op in ("++", "--", "p++"):
            place = self._place(node.expr, variables)
            value = self._load(place, variables)
            value += -1 if node.op == "--" else 1
            self._store(place, value, variables)
            return value
        value = self._value(node.expr, variables)
        return {"!": lambda: not value, "-": lambda: -value, "~": lambda: ~value}[node.op]()

    def _place(self, node: Any, variables: dict[str, Any]) -> _Pointer:
        if isinstance(node, c_ast.ID):
            return _Pointer(variables, node.name)
        if isinstance(node, c_ast.ArrayRef):
            start = self._value(node.name, variables)
            index = self._value(node.subscript, variables)
            return _Pointer(start.address + 8 * index)
        return self._value(node.expr, variables)

    def _load(self, place: _Pointer, variables: dict[str, Any]) -> Any:
        if place.name:
            return place.address[place.name]
        offset = at_address(place.address)
        return int(self._call[(place.address - self._call_at) // 8]) if offset is None else ask("read", offset)

    def _store(self, place: _Pointer, value: Any, variables: dict[str, Any]) -> None:
        if place.name:
            place.address[place.name] = value
            return
        offset = at_address(place.address)
        if offset is None:
            self._call[(place.address - self._call_at) // 8] = value
        else:
            ask("write", offset, value)

    # --- calls ---

    def _called(self, name: str, arguments: Sequence[Any], variables: dict[str, Any]) -> Any:
        if name == "__atomic_compare_exchange_n":
            word = self._value(arguments[0], variables)
            seen = self._value(arguments[1], variables)
            value = self._value(arguments[2], variables)
            is_done, found = ask("exchange", at_address(word.address), self._load(seen, variables), value)
            self._store(seen, found, variables)
            return is_done
        values: list[Any] = []
        for each in arguments:
            values.append(self._value(each, variables))  # noqa: PERF401 - see Course
        if name == "fold_range":
            self._fold(*values)
        elif name in ("SEEN", "__atomic_load_n"):
            return self._load(values[0], variables)
        elif name == "PUBLISH":
            self._store(values[1], values[2], variables)
        elif name == "FENCE":
            ask("fence")
        elif name == "yield_core":
            ask("yield")
        elif name == "PARTS_OF":
            return values[0] & (1 << self._constants["PART_BITS"]) - 1
        elif name == "min":
            return min(values)
        elif name != "AFTER_SEEING":
            return self._invoke(name, values)
        return None

    def _fold(self, out: _Pointer, factor: int, streams: int, *rows_and_count: Any) -> None:
        *rows, count = rows_and_count
        for index in range(count):
            total = 0
            for row in rows:
                term = self._load(_Pointer(row.address + 8 * index), {})
                total += term
            self._store(_Pointer(out.address + 8 * index), total, {})


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a // b,
    "<": lambda a, b: a < b, ">": lambda a, b: a > b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b,
    "&&": lambda a, b: bool(b), "||": lambda a, b: bool(b),
}  # fmt: skip

_parses: dict[tuple[int, str], tuple[dict[str, Any], dict[str, int]]] = {}


def _parsed(ranks: int, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the functions and constants of a source."""
    if (ranks, source) in _parses:
        return _parses[ranks, source]
    constants = {"ROWS": ranks}
    for names in re.findall(r"^enum \{(.*?)\}", source, re.DOTALL | re.MULTILINE):
        following = 0
        for entry in re.split(r",\s*", names.strip()):
            name, _, value = entry.partition(" = ")
            constants[name] = following = (
                sum(constants.get(each) or int(each) for each in value.split(" + ")) if value else following
            )
            following += 1
    constants["PART_BITS"] = int(re.search(r"define PART_BITS (\d+)", source)[1])  # type: ignore[index]
    texts = [_function(name, source, ranks) for name in _FUNCTIONS]
    tree = c_parser.CParser().parse("\n".join(texts))
    functions = {each.decl.name: each for each in tree.ext}
    return _parses.setdefault((ranks, source), (functions, constants))


def _function(name: str, source: str, ranks: int) -> str:
    text = re.search(rf"^inline \w+ {name}\(.*?^\}}", source, re.DOTALL | re.MULTILINE)[0]  # type: ignore[index]
    text = text.replace("ELEMENT", "float")
    text = re.sub(r"^#ifdef NEVER_YIELDS.*?^#endif", "", text, flags=re.DOTALL | re.MULTILINE)
    for macro, each in (("PARAMETER", "const float *row{}"), ("ARGUMENT_FROM", "row{} + first"), ("ARGUMENT", "row{}")):
        text = text.replace(f" OTHER_ROWS(ROWS, {macro})", "".join(f", {each.format(row)}" for row in range(1, ranks)))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"\b(inline|__global|restrict|const|volatile)\b", "", text)
