"""Sums of products in Einstein's notation, made of transposes and one batched product for each two tensors."""

from __future__ import annotations

import math
from string import ascii_letters

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.matrices import diagonal
from clcomm.engine.ops.reduce import sum
from clcomm.engine.ops.shape import reshape, transpose
from clcomm.engine.tensor import Tensor, float_tensor


def einsum(equation: str, *tensors: Tensor) -> Tensor:
    """Return the sum of products that an equation such as "bij,bjk->bik" names; without "->" as PyTorch orders it.

    Args:
        equation: a letter for each dimension of each tensor, and of the result; one that a tensor has twice stands for
            its diagonal, "..." for dimensions that broadcast.
        tensors: float32, as many as the equation has terms, multiplied from the left to the right.

    Raises ArgumentError for another number of letters or sizes.
    """
    tensors, terms, result = _parsed(equation, tensors)
    sizes: dict[str, int] = {}
    for letters, tensor in zip(terms, tensors, strict=True):
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ArgumentError(f"einsum: expected one size of {letter!r}, got {sizes[letter]} and {size}")
    left, at = tensors[0], terms[0]
    for number, (tensor, letters) in enumerate(zip(tensors[1:], terms[1:], strict=True)):
        needed = set(result).union(*terms[number + 2 :])
        left, at = _product(left, at, tensor, letters, needed, sizes)
    left, at = _summed(left, at, set(result))
    return left if at == result else transpose(left, tuple([at.index(letter) for letter in result]))


def _parsed(equation: str, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[str], str]:
    """Return the tensors with a letter of its own for each dimension, these letters, and the result's."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if equation.count("..."):
        tensors, terms, result = _spelled_out(terms, result if arrow else None, tensors, equation)
        arrow = "->"
    letters = "".join(terms) + result
    if (not letters.isalpha() and letters) or not tensors or len(terms) != len(tensors):
        raise ArgumentError(f"einsum: expected letters for each of {len(tensors)} tensors, got {equation!r}")
    for term, tensor in zip(terms, tensors, strict=True):
        if len(term) != float_tensor("einsum", tensor).ndim:
            raise ArgumentError(f"einsum: expected a letter for each dimension of {tensor.shape}, got {term!r}")
    if not arrow:
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if len(set(result)) != len(result) or not set(result) <= set("".join(terms)):
        raise ArgumentError(f"einsum: expected letters of the tensors in the result, each once, got {result!r}")
    diagonals = [_diagonals(tensor, term) for tensor, term in zip(tensors, terms, strict=True)]
    return tuple([each for each, _ in diagonals]), [term for _, term in diagonals], result


def _diagonals(x: Tensor, letters: str) -> tuple[Tensor, str]:
    """Return x with the diagonal of each two dimensions of one letter, and the letters that are left."""
    for letter in set(letters):
        while letters.count(letter) > 1:
            first, second = letters.index(letter), letters.rindex(letter)
            if x.shape[first] != x.shape[second]:
                raise ArgumentError(
                    f"einsum: expected one size of {letter!r}, got {x.shape[first]} and {x.shape[second]}"
                )
            x = diagonal(x, 0, first, second)
            letters = "".join(each for at, each in enumerate(letters) if at not in (first, second)) + letter
    return x, letters


def _spelled_out(
    terms: list[str], result: str | None, tensors: tuple[Tensor, ...], equation: str
) -> tuple[tuple[Tensor, ...], list[str], str]:
    """Return tensors, terms and the result with letters for "..."; a size of 1 among others has none, and goes."""
    counts = [x.ndim - len(term) + 3 if "..." in term else 0 for term, x in zip(terms, tensors, strict=False)]
    free = "".join(each for each in ascii_letters if each not in equation)[: max(counts, default=0)]
    if len(terms) != len(tensors) or min(counts) < 0:
        raise ArgumentError(f"einsum: expected letters for each of {len(tensors)} tensors, got {equation!r}")
    spelled = [term.replace("...", free[len(free) - count :]) for term, count in zip(terms, counts, strict=True)]
    sizes = dict.fromkeys(free, 1)
    for term, x in zip(spelled, tensors, strict=True):
        sizes |= {each: n for each, n in zip(term, x.shape, strict=False) if each in sizes and n > 1}
    kept = []
    for number, (term, x) in enumerate(zip(spelled, tensors, strict=True)):
        gone = [at for at, each in enumerate(term[: x.ndim]) if each in free and x.shape[at] < sizes[each]]
        kept.append(reshape(x, tuple([n for at, n in enumerate(x.shape) if at not in gone])))
        spelled[number] = "".join(each for at, each in enumerate(term) if at not in gone)
    if result is None:
        letters = "".join(terms).replace(".", "")
        result = "..." + "".join(sorted(each for each in set(letters) if letters.count(each) == 1))
    return tuple(kept), spelled, result.replace("...", free)


def _summed(x: Tensor, letters: str, kept: set[str]) -> tuple[Tensor, str]:
    """Return x summed over the dimensions whose letters nothing needs any more, and the letters of the rest."""
    gone = tuple([at for at, letter in enumerate(letters) if letter not in kept])
    return (sum(x, gone), "".join(each for each in letters if each in kept)) if gone else (x, letters)


def _product(
    a: Tensor, a_letters: str, b: Tensor, b_letters: str, needed: set[str], sizes: dict[str, int]
) -> tuple[Tensor, str]:
    """Return the product summed over letters of both that nothing needs, and its letters: batches, a's own, b's own."""
    a, a_letters = _summed(a, a_letters, needed | set(b_letters))
    b, b_letters = _summed(b, b_letters, needed | set(a_letters))
    shared = [letter for letter in a_letters if letter in b_letters]
    batches = "".join(letter for letter in shared if letter in needed)
    inner = "".join(letter for letter in shared if letter not in needed)
    rows = "".join(letter for letter in a_letters if letter not in shared)
    columns = "".join(letter for letter in b_letters if letter not in shared)
    m, n, k, many = (_count(letters, sizes) for letters in (rows, columns, inner, batches))
    left = reshape(_ordered(a, a_letters, batches + rows + inner), (many, m, k))
    right = reshape(_ordered(b, b_letters, batches + inner + columns), (many, k, n))
    letters = batches + rows + columns
    return reshape(matmul(left, right), tuple([sizes[letter] for letter in letters])), letters


def _count(letters: str, sizes: dict[str, int]) -> int:
    return math.prod([sizes[letter] for letter in letters])


def _ordered(x: Tensor, letters: str, order: str) -> Tensor:
    return x if letters == order else transpose(x, tuple([letters.index(letter) for letter in order]))
