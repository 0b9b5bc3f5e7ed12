"""Draws snippets: programs of some statements, each of which is tried with PyTorch while the snippet is written.

So a statement fits what the ones before it made. One that PyTorch refuses is left out, or is now and then the last.
"""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tests.snippets import courses
from tests.snippets.sides import names_of
from tests.snippets.texts import (
    ARGUMENTS,
    ARRAY_TYPES,
    ARRAYS,
    AS_ARRAYS,
    BINARY,
    CASTS,
    COMPUTED,
    DRAWN,
    EDGES,
    FUNCTIONS,
    IN_PLACE,
    INDICES,
    INITS,
    INTEGERS,
    ITERATED,
    KEPT,
    KEPT_MASKS,
    OPERATORS,
    REDUCTIONS,
    UNARY,
    USUAL,
)  # fmt: skip

#: Elements of a tensor above which statements use it no more.
MOST_ELEMENTS = 200
#: How often a statement that PyTorch refuses is the last.
REFUSED_SHARE = 0.3


class Writer:
    """Writes one snippet."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mood = self.rng.choice(tuple(MOODS))
        self.lines: list[str] = []
        self.names = names_of("torch")
        self.given = set(self.names)
        self.made = 0
        self._restart()

    def write(self) -> str:
        """Return the snippet."""
        kinds, weights = zip(*MOODS[self.mood].items(), strict=True)
        self.say(self.new("edges" if self.mood == "edges" else None))
        wanted = self.rng.randint(3, 12)
        for _ in range(60):
            if len(self.lines) >= wanted:
                break
            text = self.rng.choices(kinds, weights)[0](self)
            if text and is_python(text) and not self.say(text):
                if self.rng.random() < REFUSED_SHARE:
                    break
                self.lines.pop()
                self._restart()
        return "\n".join(self.lines)

    def say(self, text: str) -> bool:
        """Add a statement; return whether PyTorch accepts it."""
        self.lines.append(text)
        return self._run(text)

    def _run(self, text: str) -> bool:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                exec(compile(text, "snippet", "exec"), self.names)
        except Exception:
            return False
        return True

    def _restart(self) -> None:
        self.names = names_of("torch")
        self.names["torch"].manual_seed(1)
        self.names["torch"].set_grad_enabled(True)
        for line in self.lines:
            self._run(line)

    # -- names, places and values

    def name(self) -> str:
        """Return a new name."""
        self.made += 1
        letters = "abcdefghijkopqrstuvwxyz"
        return letters[self.made % 23] + str(self.made // 23 or "")

    def tensors(self, kinds: str = "fiub", is_wanted: Callable[[Any], bool] = lambda t: True) -> list[str]:
        """Return the names of tensors of NumPy's kinds of types."""
        found = []
        for name, each in self.names.items():
            if name not in self.given and isinstance(each, self.names["torch"].Tensor):
                kind = "f" if each.is_floating_point() else "b" if each.dtype == self.names["torch"].bool else "i"
                with suppress(RuntimeError):  # which is_leaf raises of a part whose whole was written to
                    if kind in kinds and 0 < each.numel() <= MOST_ELEMENTS and is_wanted(each):
                        found.append(name)
        return found

    def some(self, kinds: str = "fiub", is_wanted: Callable[[Any], bool] = lambda t: True) -> str | None:
        """Return one of those names, mostly a late one; None: there is none."""
        found = self.tensors(kinds, is_wanted)
        return self.rng.choice(found[-3:] if self.rng.random() < 0.7 else found) if found else None

    def of(self, kind: str) -> list[str]:
        """Return the names of what is of a type of that name."""
        return [name for name, each in self.names.items() if type(each).__name__ == kind]

    def value(self, text: str) -> Any:
        """Return the value of an expression in PyTorch; None where it has none."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return eval(text, self.names)
        except Exception:
            return None

    def place(self, name: str, deepest: int = 3) -> str:
        """Return an expression of a part, or of another shape, that in PyTorch shares memory with a tensor."""
        text = name
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 2, 3)[: deepest * 2 + 1])):
            tensor = self.value(text)
            if tensor is None or not hasattr(tensor, "shape") or tensor.numel() == 0:
                break
            longer = text + self._step(tuple(tensor.shape))
            if hasattr(self.value(longer), "shape"):
                text = longer
        return text

    def _step(self, shape: tuple[int, ...]) -> str:
        draw = self.rng.randrange
        plain = [".data", ".detach()", ".view(-1)", ".reshape(-1)", ".flatten()", ".unsqueeze(0)", "[None]", "[...]",
                 ".squeeze()", ".contiguous()", ".float()", ".cpu()", "[:]", ".ravel()", ".view_as({0})",
                 ".to(torch.float32)"]  # fmt: skip
        if not shape:
            return self.rng.choice(plain).format("torch.ones(1)")
        n, last = draw(shape[0]), draw(shape[-1])
        parts = [f"[{n}]", f"[{n}]", f"[{n}:]", f"[:{n + 1}]", "[::2]", f"[..., {last}]", f".narrow(0, {n}, 1)",
                 f".select(0, {n})",
                 f".unbind()[{n}]", f".split(1)[{n}]", ".chunk(2)[0]", f".select(-1, {last})", f"[-{n + 1}]",
                 f"[[{n}]]",
                 f"[torch.tensor({n})]", ".expand(2, *{0}.shape)",
                 f".index_select(0, torch.tensor([{n}]))"]  # fmt: skip
        if len(shape) > 1:
            parts += [".T", ".t()", ".transpose(0, 1)", f"[:, {draw(shape[1])}]", f"[:, {draw(shape[1])}:]", ".mT",
                      ".diagonal()",
                      f"[{n}, {draw(shape[1])}]", ".permute(1, 0)", ".swapaxes(0, 1)", ".reshape(-1)", ".flatten()",
                      f"[{n}][{draw(shape[1])}]",
                      ".view(2, -1)", ".view(-1, 2)", f"[{n}, :]", "[:, :, None]", ".unfold(1, 2, 1)",
                      ".reshape(2, -1)"]  # fmt: skip
        return self.rng.choice(parts + plain).format("torch.ones(1)")

    def number(self) -> str:
        """Return a number."""
        if self.mood == "edges" and self.rng.random() < 0.5:
            return self.rng.choice(EDGES)
        return self.rng.choice(("0", "1", "2", "3", "-1", "5", "10", *USUAL[:8]))

    def array(self, shape: tuple[int, ...], values: tuple[str, ...]) -> str:
        """Return nested lists of drawn values."""
        if not shape:
            return self.rng.choice(values)
        return f"[{', '.join(self.array(shape[1:], values) for _ in range(shape[0]))}]"

    def shape(self) -> tuple[int, ...]:
        """Return a shape of 0 to 3 dimensions."""
        ndim = self.rng.choices((0, 1, 2, 3), (1, 5, 8, 3))[0]
        return tuple(self.rng.choice((1, 2, 2, 3, 3, 4)) for _ in range(ndim))

    def fitting(self, shape: tuple[int, ...], kinds: str = "f") -> str:
        """Return an expression of a tensor that broadcasts to a shape."""
        found = self.some(kinds, lambda t: tuple(t.shape) == shape)
        if found and self.rng.random() < 0.6:
            return found
        tail = shape[self.rng.randrange(len(shape) + 1) :]
        return f"torch.tensor({self.array(tail, USUAL if self.mood != 'edges' else EDGES)})"

    # -- statements

    def new(self, kind: str | None = None) -> str:
        """A new tensor."""
        kind = kind or self.rng.choices(("float", "grad", "edges", "integer", "bool", "drawn"), self._kinds())[0]
        name, shape = self.name(), self.shape()
        if kind == "integer":
            dtype = self.rng.choice(tuple(INTEGERS) if self.mood == "integers" else ("int64",))
            values = INTEGERS[dtype] if self.mood == "integers" else ("0", "1", "2", "0", "1", "-1")
            told = "" if dtype == "int64" else f", dtype=torch.{dtype}"
            return f"{name} = torch.tensor({self.array(shape, values)}{told})"
        if kind == "bool":
            return f"{name} = torch.tensor({self.array(shape, ('True', 'False'))})"
        if kind == "drawn":
            sizes = ", ".join(map(str, shape or (3,)))
            return f"{name} = " + self.rng.choice((f"torch.rand({sizes})", f"torch.randn({sizes})",
                                                   f"torch.ones({sizes})",
                                                   f"torch.zeros({sizes})",
                                                   f"torch.randint(5, ({sizes},))"))  # fmt: skip
        told = ", requires_grad=True" if kind == "grad" else ""
        return f"{name} = torch.tensor({self.array(shape, EDGES if kind == 'edges' else USUAL)}{told})"

    def _kinds(self) -> tuple[int, ...]:
        if self.mood == "integers":
            return (1, 0, 1, 8, 1, 0)
        if self.mood == "edges":
            return (1, 2, 8, 1, 1, 0)
        return (4, 6, 0, 2, 1, 2) if self.mood in ("gradients", "kept") else (5, 2, 0, 2, 1, 2)

    def bind(self) -> str | None:
        """A name for a part of a tensor."""
        name = self.some()
        return name and f"{self.name()} = {self.place(name)}"

    def unary(self) -> str | None:
        """A function of one tensor."""
        name = self.some()
        if not name:
            return None
        place = self.place(name) if self.rng.random() < 0.3 else name
        if self.rng.random() < 0.5:
            function = self.rng.choice(UNARY)
            text = f"{place}.{function}()" if self.rng.random() < 0.5 else f"torch.{function}({place})"
        else:
            text = self.rng.choice(FUNCTIONS).format(x=place)
        return f"{self.name()} = {text}"

    def cast(self) -> str | None:
        """A tensor as another type."""
        name = self.some()
        return name and f"{self.name()} = {name}.{self.rng.choice(CASTS)}"

    def binary(self) -> str | None:
        """A function of two tensors, or of one and a number."""
        name = self.some()
        if not name:
            return None
        other = self.some() if self.rng.random() < 0.5 else None
        if other is None:
            values = INTEGERS["int32"] if self.mood == "integers" else (self.number(),)
            other = self.rng.choice((*values[:8], "True", "3", "2.5") if self.mood == "integers" else values)
        if self.rng.random() < 0.7:
            first, second = (name, other) if self.rng.random() < 0.7 else (other, name)
            return f"{self.name()} = {first} {self.rng.choice(OPERATORS)} ({second})"
        return f"{self.name()} = torch.{self.rng.choice(BINARY)}({name}, {other})"

    def reduce(self) -> str | None:
        """A reduction with arguments that may be odd."""
        name = self.some()
        if not name:
            return None
        function, given = self.rng.choice(REDUCTIONS), self.rng.choice(ARGUMENTS)
        if self.rng.random() < 0.3:
            return f"{self.name()} = torch.{function}({name}{', ' if given else ''}{given})"
        return f"{self.name()} = {name}.{function}({given})"

    def index(self) -> str:
        """An index of a tensor of up to three dimensions, which may be outside."""

        def one() -> str:
            n = self.rng.choice((0, 0, 1, 1, 2, -1, -2, 3))
            return self.rng.choice(INDICES).format(n=n)

        return ", ".join(one() for _ in range(self.rng.choice((1, 1, 2, 2, 2, 3, 3))))

    def read(self) -> str | None:
        """A part read by an index."""
        name = self.some()
        if not name:
            return None
        masks = self.tensors("b") if self.rng.random() < 0.2 else []
        integers = self.tensors("i") if self.rng.random() < 0.2 else []
        index = self.rng.choice(masks or integers or [self.index()])
        return f"{self.name()} = {name}[{index}]"

    def assign(self) -> str | None:
        """A part written by an index."""
        name = self.some()
        if not name:
            return None
        place = self.place(name, 1) if self.rng.random() < 0.4 else name
        masks = [f"{name} > 0", *self.tensors("b")] if self.rng.random() < 0.2 else []
        index = self.rng.choice(masks or [self.index()])
        part = self.value(f"{place}[{index}]")
        value = self.number()
        if self.rng.random() < 0.4 and hasattr(part, "shape"):
            value = self.fitting(tuple(part.shape), "fib")
        elif self.rng.random() < 0.1:
            value = self.rng.choice(
                ("True", "[1.0, 2.0]", "np.ones(2, np.float32)", "np.float32(3)", "torch.tensor(2)", "None", "'1'")
            )
        operator = self.rng.choice(("=", "=", "=", "+=", "*=", "-=", "/=", "//="))
        return self._wrapped(f"{place}[{index}] {operator} {value}")

    def write_in_place(self) -> str | None:
        """A write in place, to a part or through another name."""
        name = self.some()
        if not name:
            return None
        place = self.place(name)
        if self.rng.random() < 0.15 and self.value(f"{name}.grad") is not None:
            place = self.place(f"{name}.grad")
        tensor = self.value(place)
        if not hasattr(tensor, "shape"):
            return None
        shape = tuple(tensor.shape)
        operation = self.rng.choice(IN_PLACE).format(n=self.number(), v=self.fitting(shape, "fi"), m=f"({place} > 0)")
        draw = self.rng.random()
        if draw < 0.12:
            return self._wrapped(f"for row in {place}:\n    row.{operation}")
        if draw < 0.2:
            return self._wrapped(f"init.{self.rng.choice(INITS).format(x=place)}")
        if draw < 0.3:
            operator = self.rng.choice(("+=", "*=", "-=", "/=", "//=", "**=", "%="))
            return self._wrapped(f"{place} {operator} {self.number() if draw < 0.25 else self.fitting(shape, 'fi')}")
        if draw < 0.34:
            return self._wrapped(
                f"torch.{self.rng.choice(('add', 'mul', 'sub'))}({place}, {self.number()}, out={place})"
            )
        if draw < 0.37:
            return f"{name}.data = {self.fitting(shape)}"
        if draw < 0.39:
            return f"{name}.grad = {self.rng.choice(('None', self.fitting(shape)))}"
        bound = f"{self.name()} = " if draw > 0.9 else ""
        return self._wrapped(f"{bound}{place}.{operation}")

    def _wrapped(self, text: str) -> str:
        if self.rng.random() < (0.3 if self.tensors("f", lambda t: t.requires_grad) else 0.05):
            return "with torch.no_grad():\n    " + text.replace("\n", "\n    ")
        return text

    def compute(self) -> str | None:
        """An operation that keeps its operands for backward."""
        name = self.some("f")
        if not name:
            return None
        other = self.fitting(tuple(self.names[name].shape))
        return f"{self.name()} = {self.rng.choice(COMPUTED).format(x=name, y=other)}"

    def kept(self) -> str | None:
        """An operation that keeps an index, a mask or flags, as an attribute."""
        w, i, m = self.some("f", lambda t: t.ndim == 2), self.some("i"), self.some("b")
        text = self.rng.choice((*KEPT, *KEPT_MASKS) if m else KEPT)
        given = {"w": w or "torch.ones(4, 3, requires_grad=True)", "i": i or "torch.tensor([0, 1])", "m": m}
        return f"{self.name()} = {text.format(**given)}"

    def backward(self) -> str | None:
        """Gradients of what there is."""
        name = self.some("f", lambda t: t.requires_grad)
        if not name:
            return None
        draw = self.rng.random()
        text = f"({name} * torch.ones({name}.shape)).sum()" if self.rng.random() < 0.2 else f"{name}.sum()"
        leaf = self.some("f", lambda t: t.requires_grad and t.is_leaf)
        if draw < 0.1 and leaf:
            return f"{self.name()} = torch.autograd.grad({text}, {leaf})"
        if draw < 0.2:
            return f"{name}.backward({self.fitting(tuple(self.names[name].shape))})"
        if draw < 0.3:
            return f"{text}.backward(retain_graph=True)"
        return f"{text}.backward()"

    def share(self) -> str | None:
        """Memory that NumPy and PyTorch share."""
        arrays, name, draw = self.of("ndarray"), self.some(), self.rng.random()
        if arrays and draw < 0.5:
            text = self.rng.choice(ARRAYS).format(a=self.rng.choice(arrays), n=self.name())
        elif name and draw < 0.8:
            text = f"{self.name()} = " + self.rng.choice(AS_ARRAYS).format(x=name, part=self.place(name))
        else:
            dtype, shape = self.rng.choice(ARRAY_TYPES), self.rng.choice(("3", "2, 3"))
            text = f"{self.name()} = np.ones(({shape},), np.{dtype})"
        return text

    def iterate(self) -> str | None:
        """Python's own ways over a tensor."""
        name = self.some()
        return name and f"{self.name()} = {self.rng.choice(ITERATED).format(x=name)}"

    def draw(self) -> str:
        """Seeds, generators and what they draw."""
        found = self.of("Generator")
        generator = f", generator={self.rng.choice(found)}" if found and self.rng.random() < 0.7 else ""
        texts = (*DRAWN, *(f"{each}.manual_seed(3)" for each in found),
                 *(f"{{n}} = {each}.initial_seed()" for each in found))  # fmt: skip
        return self.rng.choice(texts).format(n=self.name(), g=generator)

    def course(self) -> str:
        """A training of some steps."""
        return courses.course(self.rng)

    def module(self) -> str:
        """A module, and what is written to it."""
        return courses.module(self.rng, self.name())

    def edit(self) -> str | None:
        """What is done to a module that there is."""
        found = [name for name, each in self.names.items() if hasattr(each, "named_buffers")]
        return courses.edit(self.rng, self.rng.choice(found), self.name()) if found else None

    def loss(self) -> str:
        """A loss of edge values and labels."""
        return courses.loss(self.rng, self.name())


W = Writer
#: What snippets are about: which statements they have, and how often.
MOODS: dict[str, dict[Callable[[Writer], str | None], int]] = {
    "views": {W.new: 2, W.bind: 4, W.write_in_place: 6, W.assign: 4, W.unary: 1, W.read: 2, W.binary: 1},
    "gradients": {W.new: 2, W.bind: 3, W.compute: 5, W.write_in_place: 3, W.assign: 2, W.backward: 3, W.read: 1},
    "kept": {W.new: 3, W.kept: 5, W.compute: 2, W.write_in_place: 3, W.assign: 2, W.backward: 4},
    "integers": {W.new: 3, W.binary: 6, W.cast: 4, W.unary: 3, W.reduce: 3, W.write_in_place: 2, W.read: 1},
    "edges": {W.new: 2, W.unary: 5, W.binary: 5, W.reduce: 3, W.cast: 1, W.compute: 3, W.backward: 2},
    "arguments": {W.new: 2, W.reduce: 6, W.unary: 2, W.read: 1},
    "indices": {W.new: 2, W.read: 6, W.assign: 4, W.bind: 1, W.backward: 1},
    "shared": {W.new: 2, W.share: 6, W.write_in_place: 3, W.assign: 1, W.iterate: 1},
    "iteration": {W.new: 2, W.iterate: 6, W.write_in_place: 1, W.bind: 1},
    "drawn": {W.draw: 8, W.unary: 1},
    "losses": {W.loss: 8, W.backward: 3, W.new: 1},
    "modules": {W.module: 4, W.edit: 8, W.new: 1},
    "courses": {W.course: 1},
}  # fmt: skip


def is_python(text: str) -> bool:
    """Return whether a statement can be compiled."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def snippet(seed: int) -> str:
    """Return a snippet."""
    return Writer(seed).write()
