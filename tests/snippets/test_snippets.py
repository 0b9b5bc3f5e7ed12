"""A sample of the snippets that `make snippets` draws, and the differences on purpose."""

from __future__ import annotations

import os

import pytest

from tests.snippets.differences import DIFFERENCES, PAGE, page

COUNT, FIRST = (int(os.environ.get(f"CLCOMM_SNIPPETS{name}", usual)) for name, usual in (("", "60"), ("_FROM", "0")))


#: Snippets that once had other values than PyTorch's, or an error of NumPy's.
FOUND = (
    "b = torch.zeros(2, 3)\nc = b[[[0], [1]]]",
    "b = torch.ones(2, 1)\nb[torch.tensor(0)].copy_(0.25)",     "b = torch.ones(2)\nc = b[1]\nd = c[c > 0]",
    "b = torch.ones(2).new_tensor([1, 2])",
    *("b = torch.tensor([[nan, 1, 0.5], [0.2, nan, 3], [1, 2, 0.5]], requires_grad=True)\n"
      f"c = F.multi_margin_loss(b, torch.tensor([0, 0, 2]), p={p})\nc.backward()" for p in (1, 2)),
    "b = torch.tensor([nan, -1, 0, 0.5], requires_grad=True)\nF.celu(b).sum().backward()",
    "b = F.one_hot(torch.tensor([2, -1]), 3)",
    "b = F.one_hot(torch.tensor([-1]))", "b = F.multi_margin_loss(torch.ones(2, 3), torch.tensor([3, 0]))",
    "b = torch.take_along_dim(torch.ones(3, 3), torch.tensor([[0], [1]]), 1)", "b = torch.arange(4)\nb[b > 0] //= -2.0",
    "b = torch.ones(2, 1).gather(1, torch.tensor([0, 1]).view(-1, 1))",
    "b = torch.outer(torch.ones(2, 2), torch.ones(2))",
    "b = torch.ones(4)\nc = b.view(2, 2)\nb //= 0.3", "b = torch.rand(3, generator=torch.Generator())",
    "c = torch.Generator()\nd = [list(data.RandomSampler(range(5), generator=c)) for n in range(3)]",
    "b = init.uniform_(torch.tensor([1, 2]))", "b = torch.ones(2).clamp(max=nan)",
    "b = torch.ones(2).sum().cumprod(0)", "b = torch.ones(2, 2).median(keepdim=True)",
    "b = [each * 1 for each in reversed(torch.arange(3))]",
    "b = torch.ones(2, 3)\nb[torch.tensor([True, False])] = 2", "b = torch.ones(3)\nb[[0, 1]] = torch.tensor([2, 3])",
    "b = torch.ones(2, 3).mean(dim=torch.tensor(0))", "b = torch.ones(2, 3).amax(torch.tensor(0))",
    "b = torch.where(torch.tensor(2) > 0)", "b = torch.ones(4)\nb.chunk(2)[0] += 1",
    "b = torch.ones(3, 2).masked_select(torch.tensor(False))", "b = 7 % torch.tensor([False, True])",
    "b = torch.ones(2, 3).masked_select(torch.tensor([True, False, True]))", "b = torch.ones(0, 2).split(1)[0]",
    "b = torch.dist(torch.ones(2), 0.25)", "b = torch.tensor([[True]]).trace()", "b = torch.ones(0, 2).chunk(2)",
    "b = torch.tensor(np.ones(2, np.uint8))", "b = torch.from_numpy(np.ones(2, np.int16))",
    "b = [each for each in data.DataLoader([np.uint8(200), np.uint8(100)], 2)]",
    "model = nn.BatchNorm1d(2)\ndef step(x):\n    return model(x).detach()\nstep = replayed(step)\n"
    "for n in range(8):\n    if n == 6:\n        model.eval()\n    b = step(torch.arange(8).float().reshape(4, 2))",
)  # fmt: skip


def test_what_was_found_is_right_or_refused(torch):
    from tests.snippets.sides import REFUSED, SAME, compared

    outcomes = {text: compared(text) for text in FOUND}
    assert {text: each for text, each in outcomes.items() if each.kind not in (SAME, REFUSED)} == {}


@pytest.mark.timeout(600 + COUNT)
def test_no_drawn_snippet_has_other_values_than_pytorchs(torch):
    from tests.snippets.__main__ import searched

    counts, wrong = searched(range(FIRST, FIRST + COUNT))
    assert wrong == []
    assert counts["same"] > 0.4 * COUNT, counts


@pytest.mark.parametrize("each", DIFFERENCES, ids=lambda each: each.text)
def test_what_is_different_on_purpose_is_different(torch, each):
    from tests.snippets.sides import SILENT, compared

    assert compared(each.example).kind == SILENT


def test_the_page_has_the_differences():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_wrong_value_is_found_and_shortened(torch, monkeypatch):
    from clcomm.engine import Tensor
    from tests.snippets.sides import SILENT, compared, shrunk

    text = "a = torch.ones(2)\nfor n in range(2):\n    a = a + 1\n    b = a.exp()\nc = b.sum().item()"
    assert compared(text).kind == "same"
    monkeypatch.setattr(Tensor, "exp", lambda x: x * 3)
    assert compared(text).kind == SILENT
    short = shrunk(text, lambda shorter: compared(shorter).kind == SILENT)
    assert short == "a = torch.ones(2)\nfor n in range(2):\n    b = a.exp()"
