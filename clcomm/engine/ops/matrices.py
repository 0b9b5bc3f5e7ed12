"""Products, diagonals and distances of matrices and vectors, with PyTorch's names; all float32."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from string import ascii_letters

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.ops.arrangement import outer, roll
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.elementwise import add, mul, sub
from clcomm.engine.ops.indexing import index_select, kept, spread
from clcomm.engine.ops.ordered import norm
from clcomm.engine.ops.reduce import sum
from clcomm.engine.ops.shape import reshape, transpose, unshared, unsqueeze
from clcomm.engine.ops.types import broadcast_shape, dimension_of, moved
from clcomm.engine.tensor import BOOL, Tensor, float_tensor
from clcomm.engine.view import Block, block_of, viewed

ger = outer


def addmm(x: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta * x + alpha * mat1 mat2 of matrices; x broadcasts to the product."""
    return _added("addmm", x, mm(mat1, mat2), beta, alpha)


def baddbmm(x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta * x + alpha * batch1 batch2 of batches of matrices; x broadcasts to the product."""
    return _added("baddbmm", x, bmm(batch1, batch2), beta, alpha)


def _added(name: str, x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    if broadcast_shape(name, x.shape, product.shape) != product.shape:
        raise ArgumentError(f"{name}: expected what broadcasts to shape {product.shape}, got {x.shape}")
    product = product if alpha == 1 else mul(product, float(alpha))
    return product if beta == 0 else add(x if beta == 1 else mul(x, float(beta)), product)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices."""
    return _multiplied("mm", a, b, 2, 2)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of two batches of as many matrices."""
    return _multiplied("bmm", a, b, 3, 3)


def mv(x: Tensor, vec: Tensor) -> Tensor:
    """Return the product of a matrix [M, K] and a vector [K]."""
    return _multiplied("mv", x, vec, 2, 1)


def _multiplied(name: str, a: Tensor, b: Tensor, *ndims: int) -> Tensor:
    if (a.ndim, b.ndim) != ndims or a.shape[:-2] != b.shape[:-2]:
        raise ArgumentError(f"{name}: expected {ndims[0]} and {ndims[1]} dimensions, got {a.shape} and {b.shape}")
    return matmul(a, b)


def tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """Return the sums of products over the last `dims` dimensions of a and the first of b, or over pairs of them."""
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left, right = (
            [dimension_of("tensordot", x.shape, d) for d in each] for x, each in zip((a, b), dims, strict=True)
        )
    sizes = [a.shape[d] for d in left]
    if sizes != [b.shape[d] for d in right]:
        raise ArgumentError(f"tensordot: dimensions {dims} of shapes {a.shape} and {b.shape} are not of equal size")
    outside = [[d for d in range(x.ndim) if d not in each] for x, each in ((a, left), (b, right))]
    rows = reshape(transpose(a, (*outside[0], *left)), (-1, math.prod(sizes)))
    columns = reshape(transpose(b, (*right, *outside[1])), (math.prod(sizes), -1))
    shape = [x.shape[d] for x, each in zip((a, b), outside, strict=True) for d in each]
    return reshape(matmul(rows, columns), tuple(shape))


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a diagonal of two dimensions as the last one, above the main one by `offset`; x: of any type."""
    first, second = [dimension_of("diagonal", x.shape, d) for d in (dim1, dim2)]
    rows, columns = x.shape[first], x.shape[second]
    index = _places(rows, columns, offset)
    if not index.size:
        raise ArgumentError(f"diagonal: offset: expected one within shape {(rows, columns)}, got {offset}")
    rest = [d for d in range(x.ndim) if d not in (first, second)]
    place = block_of(x)
    down, along = place.strides[first], place.strides[second]
    apart = transpose(x, (*rest, first, second))
    line = reshape(apart, (*[x.shape[d] for d in rest], rows * columns))
    start = place.first + (along * offset if offset > 0 else -down * offset)
    taken = moved(line, lambda own: index_select(own, own.ndim - 1, index))
    return viewed(x, taken, Block(start, (*[place.strides[d] for d in rest], down + along)))


def diag_embed(x: Tensor, offset: int = 0) -> Tensor:
    """Return matrices with the elements of x's last dimension on a diagonal, and zeros."""
    size = x.shape[-1] + builtins.abs(offset)
    index = kept(x.device, _places(size, size, offset))
    spaced = moved(x, lambda own: spread(own, own.ndim - 1, index, size * size))
    return reshape(spaced, (*x.shape[:-1], size, size))


@unshared
def diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return a diagonal of a matrix, or the matrix with a vector on it. See `diagonal` and `diag_embed`."""
    return diag_embed(x, diagonal) if x.ndim == 1 else x.diagonal(diagonal)


def trace(x: Tensor) -> Tensor:
    """Return the sum of a matrix's diagonal."""
    return sum(diagonal(float_tensor("trace", x) if x.dtype == BOOL else x))


def _places(rows: int, columns: int, offset: int) -> np.ndarray:
    """Return the places of a diagonal's elements in a matrix."""
    along = np.arange(max(rows, columns))
    at = along + max(-offset, 0), along + max(offset, 0)
    inside = (at[0] < rows) & (at[1] < columns)
    places: np.ndarray = (at[0] * columns + at[1])[inside]
    return places


def vector_norm(
    x: Tensor, ord: float = 2.0, axis: int | tuple[int, ...] | None = None, keepdims: bool = False
) -> Tensor:
    """Return the norm of any order of all elements, or over dimensions. See `norm`."""
    return norm(x, ord, axis, keepdims)


def dist(a: Tensor, b: Tensor, p: float = 2.0) -> Tensor:
    """Return the norm of order p of a - b, which broadcast."""
    return vector_norm(sub(a, float_tensor("dist", b)), p)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0) -> Tensor:
    """Return the distance of order p of each two rows of [..., M, K] and [..., N, K], as [..., M, N]."""
    return vector_norm(sub(unsqueeze(x1, -2), unsqueeze(x2, -3)), p, -1)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """Return the norm of order p of x1 - x2 + eps along the last dimension."""
    return vector_norm(add(sub(x1, x2), eps), p, -1, keepdim)


def cross(a: Tensor, b: Tensor, axis: int | None = None) -> Tensor:
    """Return the cross product of vectors along a dimension of size 3; None: the first such, as PyTorch's."""
    if axis is None:
        axis = a.shape.index(3) if 3 in a.shape else -1
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ArgumentError(f"cross: expected 3 elements along axis {axis}, got shapes {a.shape} and {b.shape}")
    turned = [[roll(x, shift, axis) for shift in (-1, 1)] for x in (a, b)]
    return sub(mul(turned[0][0], turned[1][1]), mul(turned[0][1], turned[1][0]))


def addmv(x: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta * x + alpha * mat vec, of a matrix and a vector."""
    return _added("addmv", x, mv(mat, vec), beta, alpha)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of products over the last dimensions of both."""
    return tensordot(a, b, ([-1], [-1])) if float_tensor("inner", b).ndim and a.ndim else mul(a, b)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """Return b times each element of a, side by side: Kronecker's product of tensors of as many dimensions."""
    if a.ndim != b.ndim:
        raise ArgumentError(f"kron: expected as many dimensions, got shapes {a.shape} and {b.shape}")
    apart = [reshape(x, tuple([n for size in x.shape for n in sizes(size)])) for x, sizes in
             ((a, lambda n: (n, 1)), (b, lambda n: (1, n)))]  # fmt: skip
    return reshape(mul(*apart), tuple([m * n for m, n in zip(a.shape, b.shape, strict=True)]))


def pdist(x: Tensor, p: float = 2.0) -> Tensor:
    """Return the distances of order p of each two rows of a matrix, those of the first row with the others first."""
    rows = np.triu_indices(x.shape[0], 1)
    first, second = (index_select(x, 0, each.astype(np.int32)) for each in rows)
    return vector_norm(sub(first, second), p, -1)


# --- Sums of products in Einstein's notation, made of transposes and one batched product for each two tensors. ---


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
