"""PyTorch's names: the same numbers are drawn, the same samples come, and a script needs other imports alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import clcomm.as_torch as ours
from clcomm.base.errors import ClcommError
from tests.proofs.ported.imports import moved

SHAPES = ((5, 3), (40,), (5,), (2, 17))


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def drawn(library):
    library.manual_seed(7)
    whole = [
        *[library.rand(*shape) for shape in SHAPES], library.randint(10, (7,)), library.randint(-3, 1000, (4,)),
        library.randint(3, size=(2, 2)), library.randperm(1), library.randperm(999), library.rand_like(library.ones(3)),
    ]  # fmt: skip
    close = [*[library.randn(*shape) for shape in SHAPES], library.normal(2.0, 3.0, (20,))]
    return [each.numpy() for each in whole], [each.numpy() for each in close]


def test_the_numbers_drawn_are_pytorchs(torch):
    (whole, close), (whole_theirs, close_theirs) = drawn(ours), drawn(torch)
    for own, theirs in zip(whole, whole_theirs, strict=True):
        assert own.dtype.kind == theirs.dtype.kind and np.array_equal(own, theirs)
    for own, theirs in zip(close, close_theirs, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=2e-6, atol=2e-6)


NEW = (
    "zeros(2, 3)", "ones((2, 3))", "full((2,), 7)", "full((2,), 1.5)", "full((2,), True)", "eye(3)", "eye(2, 3)",
    "arange(5)", "arange(2, 8, 3)", "arange(0, 1, 0.25)", "linspace(0, 1, 5)", "tensor([1, 2])", "tensor([1.5, 2])",
    "tensor([True, False])", "tensor(3)", "tensor([[1, 2], [3, 4]], dtype=torch.float32)",
    "zeros(3, dtype=torch.long)", "ones_like(torch.zeros(2))", "full_like(torch.zeros(2), 3.0)",
    "zeros_like(torch.ones(2, dtype=torch.int64))", "as_tensor(np.ones(3, np.float32))", "from_numpy(np.arange(3))",
    "cat([torch.ones(2), torch.zeros(1)])", "FloatTensor([1, 2])", "LongTensor([1, 2])",
    "FloatTensor(2, 3).fill_(1.0)", "empty(2).fill_(3.0)", "is_tensor(torch.ones(1))", "t(torch.ones(2, 3))",
    "tensor([torch.tensor(1.0), torch.tensor(2.0)])", "mm(torch.ones(2, 3), torch.ones(3, 2))",
)  # fmt: skip


@pytest.mark.parametrize("text", NEW)
def test_new_tensors_are_pytorchs(torch, text):
    own, theirs = (eval(f"torch.{text}", {"torch": library, "np": np}) for library in (ours, torch))
    if isinstance(theirs, bool):
        assert own == theirs
        return
    assert own.shape == tuple(theirs.shape) and own.numpy().dtype.kind == theirs.numpy().dtype.kind
    assert np.array_equal(own.numpy(), theirs.numpy())


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}, {"batch_size": 1}])
def test_batches_are_pytorchs(torch, options):
    options = {"batch_size": 4, **options}
    x, y = np.arange(22, dtype=np.float32).reshape(11, 2), np.arange(11)
    found = []
    for library, kind in ((ours, ours.data.TensorDataset), (torch, torch.utils.data.TensorDataset)):
        library.manual_seed(3)
        data = kind(library.tensor(x), library.tensor(y))
        loader = library.utils.data.DataLoader(data, **options)
        passes = [[[each.tolist() for each in batch] for batch in loader] for _ in range(2)]
        found.append((len(loader), passes, library.rand(2).tolist()))
    assert found[0] == found[1]


def test_samples_drawn_with_replacement_and_splits_are_pytorchs(torch):
    found = []
    for library, data in ((ours, ours.data), (torch, torch.utils.data)):
        library.manual_seed(5)
        rows = data.TensorDataset(library.arange(50))
        chosen = [*data.RandomSampler(rows, replacement=True, num_samples=70)]
        found.append((chosen, [list(part.indices) for part in data.random_split(rows, [30, 20])]))
    assert found[0] == found[1]


def test_distributions_are_pytorchs_but_for_what_is_drawn(torch):
    weights = np.random.default_rng(0).random((4, 3)).astype(np.float32)
    found = []
    for library in (ours, torch):
        categorical = library.distributions.Categorical(library.tensor(weights))
        normal = library.distributions.Normal(library.tensor([0.0, 1.0]), library.tensor([1.0, 2.0]))
        value = library.tensor([0, 2, 1, 1])
        values = categorical.log_prob(value), categorical.entropy(), normal.log_prob(library.tensor([0.5, 0.5]))
        found.append([each.numpy() for each in values])
    for own, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-5)
    ours.manual_seed(1)
    wide = ours.distributions.Categorical(ours.tensor(np.tile(weights[0], (20000, 1))))
    shares = np.bincount(wide.sample().numpy(), minlength=3) / 20000
    np.testing.assert_allclose(shares, weights[0] / weights[0].sum(), atol=0.02)


@pytest.mark.parametrize("replacement", [False, True])
def test_a_multinomial_sample_has_the_weights(replacement):
    ours.manual_seed(2)
    weights = ours.tensor([0.0, 3.0, 1.0, 4.0])
    rows = ours.multinomial(weights.expand(4000, 4), 2, replacement).numpy()
    assert rows.min() == 1 and (replacement or (rows[:, 0] != rows[:, 1]).all())
    np.testing.assert_allclose((rows[:, 0] == 3).mean(), 0.5, atol=0.04)
    with pytest.raises(ClcommError, match="expected 4 columns with a weight above 0"):
        ours.multinomial(weights, 4)
    with pytest.raises(ClcommError, match="weights from 0 up"):
        ours.multinomial(weights - 1.0, 1)


def test_what_is_not_there_says_so():
    with pytest.raises(AttributeError, match="values are float32"):
        ours.float64  # noqa: B018
    with pytest.raises(AttributeError, match=r"no equal of torch\.sparse"):
        ours.sparse  # noqa: B018
    for call, said in (
        (lambda: ours.tensor([1.0]).to(np.float64), "expected float32, int32 or bool, got float64"),
        (lambda: ours.zeros(2, dtype=np.float16), "expected float32, int32 or bool, got float16"),
        (lambda: ours.nn.Linear(2, 2).to(np.float64), "got float64"),
        (lambda: ours.device("abacus"), "the kind of the default device, got 'abacus'"),
        (lambda: ours.zeros(2, dtype="a word"), "expected float32, int32 or bool, got 'a word'"),
        (lambda: ours.tensor([2**40]), "integers must fit int32"),
        (lambda: ours.tensor([2**40], dtype=ours.long), "integers must fit int32"),
        (lambda: ours.tensor([1e30], dtype=ours.long), "integers must fit int32"),
        (lambda: ours.arange(2**31, 2**31 + 2), "integers must fit int32"),
        (lambda: ours.randint(3, 3, (2,)), "expected low < high"),
        (lambda: ours.randint(0, 2**40, (2,)), "expected low < high within int32"),
        (lambda: ours.data.DataLoader([1], timeout=3), "expected no timeout"),
        (lambda: ours.data.DataLoader([1], shuffle=True, sampler=[0]), "shuffle or a sampler, got both"),
        (lambda: ours.data.random_split([1, 2], [1]), "lengths that add up to 2"),
        (lambda: ours.data.RandomSampler([1], num_samples=2), "at most 1 samples"),
        (lambda: ours.save([1], "x"), "expected a state_dict, got list"),
        (lambda: ours.distributions.Categorical(), "probs or logits, got both or none"),
    ):
        with pytest.raises(ClcommError, match=said):
            call()


def test_weights_are_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    model, other = ours.nn.Linear(3, 2), ours.nn.Linear(3, 2)
    ours.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(ours.load(tmp_path / "weights.pt"))
    assert np.array_equal(model.weight.numpy(), other.weight.numpy())


LINES = """
import torch
import torch.nn as nn
import torch.nn.functional as F  # functions
    from torch.optim.lr_scheduler import StepLR
from torch import nn, optim
import torch.utils.data
import torchvision
x = "import torch"
"""


def test_the_imports_of_the_page_are_those_of_the_proof():
    text, changed = moved(LINES)
    assert changed == 6 and "\nimport torchvision\n" in text and '"import torch"' in text
    assert "\n    from clcomm.optim.lr_scheduler import StepLR\n" in text
    page = (Path(__file__).parents[2] / "docs" / "ported.md").read_text()
    rows = [line.strip("| ").split("` | `") for line in page.splitlines() if line.startswith(("| `import", "| `from"))]
    assert len(rows) > 6
    for theirs, own in rows:
        assert moved(theirs.strip("`"))[0] == own.strip("`")


SCRIPT = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
x = torch.randn(64, 5)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = optim.Adadelta(model.parameters(), lr=0.5)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
"""


def test_a_script_has_pytorchs_losses_with_other_imports(torch, tmp_path):
    from tests.proofs.ported.__main__ import difference, losses_of
    from tests.proofs.ported.scripts import Script

    folder = tmp_path / "clones" / "someone+something"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text(SCRIPT)
    script = Script("own", "someone/something", ".", steps=20)
    theirs, _, wrong = losses_of(script, tmp_path / "clones", tmp_path, "torch")
    own, changed, failure = losses_of(script, tmp_path / "clones", tmp_path, "clcomm")
    assert (wrong, failure, changed, len(theirs), len(own)) == ("", "", 5, 20, 20)
    assert max(map(difference, theirs, own)) < 1e-5
    assert max(map(difference, theirs, theirs[::-1])) > 1e-3


def test_samplers_and_datasets_are_pytorchs(torch):
    found = []
    for library in (ours, torch):
        library.manual_seed(3)
        data = library.utils.data
        whole = data.ConcatDataset([data.TensorDataset(library.arange(n)) for n in (3, 4)])
        batches = data.DataLoader(whole, batch_sampler=data.BatchSampler(data.SubsetRandomSampler(range(7)), 3, False))
        turn = data.DataLoader(_Counting(data.IterableDataset), batch_size=2, drop_last=True)
        found.append([
            len(whole), int(whole[-1][0]), int(whole[3][0]), len(batches), [each[0].tolist() for each in batches],
            [each.tolist() for each in turn], list(data.SequentialSampler(whole)),
        ])  # fmt: skip
    assert found[0] == found[1]
    drawn_numbers = list(ours.data.WeightedRandomSampler([0.0, 1.0, 3.0], 50))
    assert len(drawn_numbers) == 50 and set(drawn_numbers) == {1, 2}
    for refused in ({"batch_size": 2, "batch_sampler": [[0]]}, {"batch_sampler": [[0]], "shuffle": True}):
        with pytest.raises(ClcommError, match="expected batch_sampler, or batch_size and an order, got both"):
            ours.data.DataLoader(whole, **refused)


def _Counting(base):
    class Counting(base):
        def __iter__(self):
            return iter([np.float32(n) for n in range(5)])

    return Counting()


def test_recording_is_switched_as_pytorch_does(torch):
    found = []
    for library in (ours, torch):
        x, seen = library.ones(1, requires_grad=True), []

        @library.set_grad_enabled(False)
        def without(x=x):
            return (x * 2).requires_grad

        seen += [(x * 2).requires_grad, without(), (x * 2).requires_grad]
        with library.no_grad():
            with library.enable_grad():
                seen.append((x * 2).requires_grad)
            seen.append((x * 2).requires_grad)
            with library.set_grad_enabled(True):
                seen.append((x * 2).requires_grad)
        library.set_grad_enabled(False)
        seen.append((x * 2).requires_grad)
        library.set_grad_enabled(True)
        seen.append((x * 2).requires_grad)
        y = x * 3
        y.retain_grad()
        (y * y).sum().backward(retain_graph=True)
        (y * y).sum().backward()
        found.append([*seen, y.grad.tolist()])
    assert found[0] == found[1]


def test_initial_values_are_pytorchs(torch):
    found = []
    for library in (ours, torch):
        library.manual_seed(11)
        init = library.nn.init
        values = [
            init.trunc_normal_(library.empty(40, 30), std=0.02), init.trunc_normal_(library.empty(7), 1.0, 2.0, 0.5, 4),
            init.eye_(library.empty(3, 4)), init.dirac_(library.empty(4, 2, 3, 3), 2), library.empty(9).normal_(1, 2),
            library.empty(20).uniform_(-1, 3), library.empty(30).random_(5), library.empty(9).random_(),
            library.empty(30).random_(2, 9),
        ]  # fmt: skip
        found.append([each.numpy() for each in values])
    for own, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=3e-6, atol=3e-6)
    assert 0.2 < ours.empty(1000).bernoulli_(0.3).mean().item() < 0.4
    with pytest.raises(ClcommError, match="trunc_normal_: expected a < b"):
        ours.nn.init.trunc_normal_(ours.empty(2), 0, 1, 9, 10)


def test_a_generator_without_a_seed_draws_pytorchs_numbers(torch):
    found = [library.rand(5, generator=library.Generator()).tolist() for library in (ours, torch)]
    assert found[0] == found[1]


def test_parts_of_a_module_by_name(torch):
    for library in (ours, torch):
        nn = library.nn
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
        assert model.get_submodule("1.0") is model[1][0] and model.get_submodule("") is model
        assert model.get_parameter("0.weight") is model[0].weight
        assert model.get_buffer("1.0.running_mean") is model[1][0].running_mean
        assert model.float().cpu() is model
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        assert model[0].weight.view(-1).tolist() == (vector[:12] * 2).tolist()
        state = dict(list(model.state_dict().items())[1:], more=np.zeros(1))
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["0.weight"], ["more"])
    model = ours.nn.Sequential(ours.nn.Linear(3, 4), ours.nn.ReLU())
    assert repr(model) == "Sequential(\n  (0): Linear(weight [4, 3], bias [4])\n  (1): ReLU()\n)"
    for mistake, said in (
        (lambda: model.get_submodule("2"), "module: expected one of , 0, 1, got '2'"),
        (lambda: model.get_parameter("0.w"), "parameter: expected one of weight, bias, got 'w'"),
        (lambda: model.half(), "module: expected float32"), (model.cuda, "expected one of cpu:0"),
        (lambda: ours.nn.utils.vector_to_parameters(ours.ones(3), model.parameters()), "split: expected sizes"),
    ):  # fmt: skip
        with pytest.raises(ClcommError, match=said):
            mistake()
