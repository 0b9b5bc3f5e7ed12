"""Differences from PyTorch on purpose: a table of docs/ported.md.

`python -m tests.snippets.differences` writes it to tests/proofs/on-purpose.md. A test runs each example, which has to
differ; drawn snippets may differ in the same way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "proofs" / "on-purpose.md"
_HEAD = "# Differences from PyTorch on purpose\n\n| the engine | example |\n|---|---|\n"


class Difference(NamedTuple):
    """A difference: its text on the page, an example, and what drawn snippets that differ so have in common.

    pattern: of the shortest snippet; "": none is drawn. said: of what `sides.compared` says.
    """

    text: str
    example: str
    pattern: str = ""
    said: str = ""


_TURNED = r"\.(T|mT|t\(\)|transpose|permute|swapaxes)"
DIFFERENCES = (
    Difference("`int64` means int32: larger values are refused", "n = str(torch.tensor([1]).dtype)", r"dtype\)"),
    Difference("an array of `float64` becomes float32", "a = torch.tensor(np.ones(2))", r"np\.", "float32 for float64"),
    Difference("`dtype` is NumPy's", "n = str(torch.ones(1).dtype)", r"dtype\)"),
    Difference("`state_dict` has arrays, which do not follow the parameters",
               "m = nn.Linear(2, 1)\nkept = m.state_dict()\nm.weight.data.zero_()", r"state_dict"),
    Difference("dropout, `bernoulli`, `multinomial` and `Categorical` draw other numbers",
               "a = F.dropout(torch.ones(40))", r"dropout|bernoulli|multinomial|gumbel"),
    Difference("`copy.copy` copies the values", "a = torch.ones(2)\nb = copy.copy(a)\nb.add_(1)", r"copy\.copy\("),
    Difference("`numpy()` has the values at its call, in an array that can't be written to",
               "a = torch.zeros(2)\nkept = a.numpy()\na.add_(1)", r"numpy\(\)|asarray"),
    Difference("what is written to an array after `from_numpy` is not the tensor's; the reverse holds",
               "kept = np.zeros(2, np.float32)\na = torch.from_numpy(kept)\nkept[0] = 1", r"from_numpy|as_tensor"),
    Difference("an element of every type has four bytes", "n = torch.tensor([True]).element_size()", r"element_size"),
    Difference("texts of tensors and modules are others", "n = repr(torch.ones(1))", r"repr|str\("),
    Difference("`numpy()` takes tensors that need a gradient", "a = torch.ones(2, requires_grad=True).numpy()",
               r"numpy|np\.", "^PyTorch raises .*numpy"),
    Difference("parts that `unbind`, `split`, `chunk` and iterations give may be written to",
               "a = torch.ones(2, requires_grad=True) * 1\nb = a.unbind()[0]\nb.add_(1)", r".", "Output [0-9] of"),
    Difference("`binary_cross_entropy` takes values outside of 0 to 1",
               "a = F.binary_cross_entropy(torch.tensor([0.5]), torch.tensor([2.0]))", r"BCELoss|binary_cross_entropy",
               "between 0 and 1"),
    Difference("`soft_margin_loss` of large values is finite",
               "a = F.soft_margin_loss(torch.tensor([1e30]), torch.tensor([-1.0]))", r"soft_margin_loss", "inf"),
    Difference("`gelu` of infinity is infinity", "a = F.gelu(torch.full((8,), inf))", r"gelu|GELU"),
    Difference("random values come to a transposed tensor in its own order, not in its memory's",
               "a = torch.ones(2, 3)\na.T.normal_()",
               rf"{_TURNED}.*(normal_|uniform_|random_)|_\(.*{_TURNED}"),
    Difference("labels may change between `cross_entropy` and its backward, which keeps the gradient",
               "a = torch.ones(1, 2, requires_grad=True)\nb = torch.tensor([0])\n"
               "c = F.cross_entropy(a, b)\nb += 1\nc.backward()",
               r"cross_entropy|CrossEntropyLoss", "modified by an inplace operation"),
    Difference("a tensor in place of `dim` of `min` and `max` is another operand",
               "a = torch.ones(2, 2).min(dim=torch.tensor(0))", r"dim=torch\.tensor", "tensor for list"),
    Difference("rows that an iteration within `no_grad` goes through need no gradient",
               "with torch.no_grad():\n    for row in torch.ones(2, 2, requires_grad=True).T:\n        pass",
               r"for row", "^row.*requires_grad"),
    Difference("a part that was taken and written to in `no_grad` may be asked for its `grad_fn`",
               "a = torch.ones(2, requires_grad=True)\nwith torch.no_grad():\n    b = a[:1].zero_()", r"no_grad",
               "A view was created in no_grad mode"),
    Difference("a value may have the memory to whose elements it is written",
               "a = torch.ones(2)\na[a > 0] = a", rf"\] = |{_TURNED}.*_\(",
               "refer to a single memory location"),
    Difference("an index of `True` and others takes values of another type",
               "a = torch.ones(2, 2).long()\na[True, ..., 1] = torch.ones(2)",
               r"\[(True|False),", "Index put requires"),
    Difference("`clip_grad_value_` takes parameters without gradients",
               "nn.utils.clip_grad_value_(nn.Linear(1, 1).parameters(), 0.1)", r"clip_grad_value_",
               "nested_tensorlist"),
    Difference("the mean of infinity and a number that `var_mean` and `std_mean` give is infinity",
               "a = torch.var_mean(torch.tensor([inf, 1.0]))", r"(var|std)_mean", "inf for nan"),
    Difference("squares above 3e38 make the `std` infinite",
               "a = torch.tensor([2.5, 1e30]).std()", r"std", r"inf\]* for"),
    Difference("squares above 3e38 make rows of `layer_norm` 0",
               "a = F.layer_norm(torch.tensor([2.5, 1e30, -90.0, 0.0]), (4,))", r"(layer|group)_norm|(Layer|Group)Norm",
               r"0\. .* for .*nan"),
    Difference("`sqrt` is rounded to the nearest", "a = torch.tensor(3e38).sqrt().sin()",
               r"sqrt[\s\S]*\b(sin|cos|tan)\b"),
    Difference("products of matrices may add up infinities in another order",
               "a = torch.tensor([[nan, 0.0, inf], [2.5, 1e-30, -3e38], [100.0, 1e30, 0.5]])\nb = a @ a",
               r"@|matmul|mm\(|einsum", r"inf.* for .*nan"),
    Difference("a row whose label is ignored has a gradient of 0, also where it is NaN",
               "a = torch.tensor([[nan, 1.0]], requires_grad=True)\nF.cross_entropy(a, torch.tensor([-100]), "
               "reduction='sum').backward()", r"cross_entropy|CrossEntropy|nll_loss", r"grad: .*0.* for .*nan"),
    Difference("results of turned tensors lie in the order of their elements, so that `reshape` gives a view of them",
               "a = torch.ones(2, 3).T.flip(0)\nb = a.reshape(-1)\na.zero_()",
               rf"{_TURNED}[\s\S]*(reshape|flatten|ravel)\("),
    Difference("`param_groups` has objects that are read and written as dictionaries",
               "n = isinstance(optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).param_groups[0], dict)"),
)  # fmt: skip


def is_meant(text: str, said: str) -> bool:
    """Return whether a shortest snippet differs in one of these ways."""
    return any(each.pattern and re.search(each.pattern, text) and re.search(each.said, said) for each in DIFFERENCES)


def page() -> str:
    """Return the table's file."""
    rows = [f"| {each.text} | `{each.example.replace(chr(10), '; ')}` |" for each in DIFFERENCES]
    return _HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
