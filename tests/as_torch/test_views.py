"""A part of a tensor is a view: what is written to it, or to what it is a part of, is seen by both, as in PyTorch.

Programs are drawn line by line, and run under both libraries' names: values and gradients are PyTorch's, or the line is
refused. `make views` draws 20,000; CLCOMM_VIEW_CASES is how many, CLCOMM_VIEW_SEED where the draw begins.
"""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest

import clcomm.as_torch as ours
from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.engine import Replay, registry
from clcomm.engine.view import root_of

CASES, SEED = int(os.environ.get("CLCOMM_VIEW_CASES", "300")), int(os.environ.get("CLCOMM_VIEW_SEED", "1"))

#: Tensors to begin with: values, integers, booleans, a result on the tape, a parameter's values, a gradient.
BASES = (
    "x = torch.tensor(values)", "x = torch.arange(24).reshape(values.shape)", "x = torch.tensor(values) > 0",
    "w = torch.tensor(values, requires_grad=True); x = w * 2", "w = torch.tensor(values, requires_grad=True); x = w",
    "w = torch.tensor(values, requires_grad=True); x = (w * 2).view(4, 6)",
    "w = torch.tensor(values, requires_grad=True); x = w.data",
    "w = torch.tensor(values, requires_grad=True); (w * w).sum().backward(); x = w.grad",
    "layer = torch.nn.Linear(4, 6); layer.weight.data.copy_(torch.tensor(values).reshape(6, 4)); x = layer.weight.data",
    "w = torch.tensor(values, requires_grad=True); x = torch.zeros(2, 3, 4); x += w",
)  # fmt: skip

#: Ways of taking a part of {}, of any shape where it has enough dimensions; some give copies.
TAKEN = (
    "{}[0]", "{}[-1]", "{}[1:]", "{}[:2]", "{}[..., 1]", "{}[..., ::2]", "{}[:, 1]", "{}[:, 1:3]", "{}[None]",
    "{}[...]", "{}[0, 1]", "{}[1:, :2]", "{}[:, None]", "{}[:, 0:1]", "{}.select(1, 0)", "{}.select(0, -1)",
    "{}.narrow(0, 1, 1)", "{}.narrow(1, 0, 2)", "{}.chunk(2)[1]", "{}.chunk(2, 1)[0]", "{}.split(1)[0]",
    "{}.split([1, 1])[1]", "{}.unbind(0)[1]", "{}.unbind(1)[0]", "list({})[1]", "{}.tensor_split(2)[0]",
    "torch.split({}, 2, 1)[0]", "{}.transpose(0, 1)", "{}.transpose(-1, -2)", "{}.T", "{}.mT", "{}.t()",
    "{}.permute(2, 0, 1)", "{}.permute(1, 0)", "{}.swapaxes(0, -1)", "{}.movedim(0, 1)", "{}.unsqueeze(0)",
    "{}.unsqueeze(-1)", "{}.squeeze()", "{}.squeeze(0)", "{}.view(-1)", "{}.reshape(-1)", "{}.reshape(2, -1)",
    "{}.reshape(-1, 2)", "{}.flatten()", "{}.flatten(0, 1)", "{}.ravel()", "{}.unflatten(0, (1, -1))",
    "{}.view_as({})", "{}.expand(2, -1, -1)", "{}.expand(3, *{}.shape)", "{}.unsqueeze(0).expand(2, *{}.shape)",
    "torch.diagonal({})", "{}.diagonal(1)", "{}.diagonal(-1, 0, 1)", "{}.diagonal(0, -2, -1)", "{}.unfold(0, 2, 2)",
    "{}.unfold(-1, 2, 1)", "{}.detach()", "{}.data", "{}.contiguous()", "{}.clone()", "{}.repeat(1, 1, 1)",
    "{}.flip(0)", "{}.T.contiguous()", "{}.T.reshape(-1)", "{}.roll(0, 0)", "{}[[0, 1]]", "{}[:, [1, 0]]",
    "{}[{} > 0]", "{}.cpu()", "torch.atleast_2d({})", "torch.broadcast_to({}, (2, *{}.shape))", "{}.float()",
    "{}.index_select(0, torch.tensor([0, 1]))", "torch.narrow({}, 0, 0, 1)", "torch.movedim({}, -1, 0)",
    "torch.squeeze({})", "torch.cat([{}])", "{} + 0",
)  # fmt: skip

#: Ways of writing to {}.
WRITTEN = (
    "{}.fill_(3)", "{}.zero_()", "{}.add_(1)", "{}.sub_(2)", "{}.mul_(3)", "{}.div_(2)", "{} += 1", "{} -= 2",
    "{} *= 2", "{} /= 4", "{}.copy_({} + 1)", "{}.copy_(torch.ones_like({}))", "{}[0] = 5", "{}[..., 0] = 6",
    "{}[...] = 7", "{}[1:] = 8", "{}[0][..., 1] = 9", "{}[{} > 0] = 4", "{}[:] = {} + 2", "{}[-1] += 3",
    "{}[0].mul_(2)", "{}[1:] *= 2", "{}.clamp_(0, 2)", "{}.neg_()", "{}.abs_()", "{}.masked_fill_({} > 1, 2)",
    "{}.relu_()", "{}.sigmoid_()", "{}.addcmul_({}.clone(), torch.ones_like({}))", "torch.nn.init.constant_({}, 2)",
    "torch.nn.init.ones_({})", "torch.nn.init.zeros_({})", "torch.nn.init.eye_({})", "for row in {}: row.mul_(2)",
    "for row in {}: row += 1", "{}.T.fill_(2)", "{}.view(-1)[1:].add_(1)", "{}.data.mul_(2)", "{}.detach().add_(1)",
    "{}.data[0] = 3", "{}[0].copy_({}[-1])", "{}[[0, 1]] = 2", "{}[:, 1] = torch.ones({}.shape[0])",
    "{}.add_({}.sum())", "{}.exp_().log_()", "{}.diagonal().fill_(1)", "{}.unsqueeze(0).mul_(2)",
    "{}.squeeze().add_(1)", "{}.add_({}, alpha=2)", "{}.t().zero_()", "{}.select(0, 0).fill_(4)",
    "{}.narrow(0, 0, 1).mul_(3)", "{}.chunk(2)[0].zero_()", "{}.mul_({})",
    "{}.scatter_(0, torch.zeros(1, 1, dtype=torch.long), 5.0)", "{}.tril_()",
    "{}.index_fill_(0, torch.tensor([0]), 2)", "{}.requires_grad_()", "{}.mul_(w.sum())", "{}[0] = w.mean()",
    "{}.copy_(w.reshape(-1)[:1])",
)  # fmt: skip


class Program:
    """One drawn program, under both libraries' names."""

    def __init__(self, torch: Any, draw: random.Random):
        self.draw, self.lines = draw, []
        values = np.float32(np.random.default_rng(draw.getrandbits(32)).integers(-4, 5, (2, 3, 4)) / 2)
        self.scopes = [{"torch": library, "values": values} for library in (ours, torch)]

    def run(self, line: str) -> str:
        """Run a line under both names; return "both", "refused" or "neither"."""
        self.lines.append(line)
        mine, theirs = self.scopes
        try:
            exec(line, theirs)
        except Exception:
            return "neither"
        try:
            exec(line, mine)
        except ClcommError as error:
            self.refusal = f"{line}: {error}"
            return "refused"
        return "both"

    def names(self, also: str = "") -> list[str]:
        return [name for name in self.scopes[1] if name in ("x", also) or (name[0] == "v" and name[1:].isdigit())]

    def differs_in_order(self, name: str) -> bool:
        """Return whether a tensor lies in the order of its elements here, and not with PyTorch."""
        mine, theirs = (scope[name] for scope in self.scopes)
        return mine.is_contiguous() and not theirs.is_contiguous()

    def compare(self) -> bool:
        """Compare all tensors' values; return False where one is refused."""
        mine, theirs = self.scopes
        for name in self.names("w"):
            one, other = mine[name], theirs[name].detach()
            try:
                found = one.detach().numpy()
            except ClcommError as error:
                self.refusal = f"{name}: {error}"
                return False
            assert found.shape == tuple(other.shape), self.lines
            message = "\n".join([*self.lines, name])
            np.testing.assert_allclose(found, other.numpy(), rtol=1e-4, atol=1e-5, err_msg=message)
        return True

    def gradients(self) -> str:
        """Compare the leaf's gradient by all tensors that have one; return what `run` returns."""
        results = []
        for scope, error in zip(self.scopes[::-1], (Exception, ClcommError), strict=True):
            torch = scope["torch"]
            names = self.names()
            try:
                total = torch.zeros(())
                for number, name in enumerate(names):
                    if scope[name].requires_grad and scope[name].grad_fn is not None:
                        total = total + (scope[name] * scope[name]).sum() * (number + 1)
                if "w" in scope:
                    scope["w"].grad = None
                if total.requires_grad:
                    total.backward()
            except error as refusal:
                self.refusal = f"backward: {refusal}"
                return "neither" if error is Exception else "refused"
            grad = scope["w"].grad if "w" in scope else None
            results.append(None if grad is None else grad.numpy())
        theirs, own = results
        if theirs is None or own is None:
            assert own is None or not own.any(), (self.lines, own)
            assert theirs is None or not theirs.any(), (self.lines, theirs)
        else:
            np.testing.assert_allclose(own, theirs, rtol=1e-3, atol=1e-4, err_msg="\n".join(self.lines))
        return "both"


def drawn_case(torch: Any, number: int) -> str:
    """Run one program; return how it ended."""
    draw = random.Random(number)
    program = Program(torch, draw)
    assert program.run(draw.choice(BASES)) == "both"
    taken, is_trained = 0, "requires_grad=True" in program.lines[0]
    for _ in range(draw.randint(2, 9)):
        name, is_first = draw.choice(program.names()), taken == 0
        if is_first or draw.random() < 0.5:
            taken += 1
            line = f"v{taken} = " + draw.choice(TAKEN).replace("{}", name)
        else:
            line = draw.choice(WRITTEN).replace("{}", name)
            if is_trained:  # what PyTorch keeps for backward changes by `data` unseen
                line = line.replace(".data", ".detach()")
        if draw.random() < (0.5 if is_trained else 0.1):
            line = f"with torch.no_grad():\n    {line}"
        end = program.run(line)
        may_have_written = any(part in line for part in ("for row", "exp_", "[[0, 1]] ="))
        if end == "refused" or (end == "neither" and may_have_written):
            return end
        if end == "both" and any(program.differs_in_order(name) for name in program.names()):
            return "neither"  # on purpose: see "turned" in tests/snippets/differences.py
        if end == "neither":
            taken -= line.count(f"v{taken} = ")
            program.lines.pop()
            continue
        if draw.random() < 0.3 and not program.compare():
            return "refused"
    if not program.compare():
        return "refused"
    return program.gradients()


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.filterwarnings("ignore")
def test_values_and_gradients_of_drawn_programs_are_pytorchs_or_refused(torch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = [drawn_case(torch, number) for number in range(SEED, SEED + CASES)]
    assert ends.count("both") > CASES // 2, {end: ends.count(end) for end in set(ends)}


WRITES = {
    "a part's": lambda x: x[0].fill_(3.0), "a part of a part's": lambda x: x[0][1:].mul_(2.0),
    "rows'": lambda x: [row.div_(2.0) for row in x], "a turned one's": lambda x: x.T[1].add_(1.0),
    "a shape's": lambda x: x.view(-1)[1::2].zero_(), "init's": lambda x: ours.nn.init.ones_(x[1:]),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_replayed_step_that_writes_to_parts_does_the_same(write):
    kept, results = [], []
    for is_replayed in (True, False):
        buffer = ours.tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
        part = buffer[:, 1]

        def step(x, buffer=buffer):
            with ours.no_grad():
                write(buffer)
                buffer[0] += x
                return buffer.sum() + x

        run = Replay(step) if is_replayed else step
        sums = [run(ours.tensor(np.float32(number)).reshape(1)).numpy() for number in range(6)]
        results.append([*sums, buffer.numpy(), part.numpy()])
        kept.append(part)
    for own, other in zip(*results, strict=True):
        assert np.array_equal(own, other)


def test_a_part_from_before_a_replayed_step_is_read_again_where_its_whole_has_changed():
    whole = ours.tensor(np.zeros((3, 2), np.float32))
    part = whole.T[1]
    run = Replay(lambda x: x + part)
    x = ours.tensor(np.ones(3, np.float32))
    for number in range(12):
        if number % 5 == 4:
            whole.add_(1.0)
        assert np.array_equal(run(x).numpy(), 1.0 + whole.numpy()[:, 1])
    assert run.replayed >= 3


def test_a_step_that_writes_to_its_argument_writes_to_the_callers():
    run = Replay(lambda x: x.add_(1.0).sum())
    x = ours.tensor(np.zeros(3, np.float32))
    part = x[:2]
    for number in range(1, 8):
        assert run(x).item() == 3 * number
        assert np.array_equal(part.numpy(), np.full(2, number, np.float32))


def test_a_gradients_parts_and_a_parameters_follow_it_to_other_memory():
    layer = ours.nn.Linear(3, 2)
    values, row = layer.weight.data, layer.weight.data[0]
    optimizer = ours.optim.SGD(layer.parameters(), lr=0.5)
    x = ours.tensor(np.float32([[1.0, 2.0, 3.0]]))
    layer(x).sum().backward()
    slope = layer.weight.grad[1]
    layer(x).sum().backward()
    assert np.array_equal(slope.numpy(), [2.0, 4.0, 6.0])
    slope.zero_()
    assert np.array_equal(layer.weight.grad.numpy(), [[2.0, 4.0, 6.0], [0.0, 0.0, 0.0]])
    before = layer.weight.numpy()
    optimizer.step()
    after = before - np.float32([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    for own, wanted in ((layer.weight, after), (values, after), (row, after[0])):
        np.testing.assert_allclose(own.numpy(), wanted, rtol=1e-6)
    row.fill_(7.0)
    assert np.array_equal(layer.weight.numpy()[0], [7.0, 7.0, 7.0])


def test_what_would_be_lost_on_the_host_is_refused_and_a_tensor_of_an_array_writes_to_it():
    x = ours.tensor(np.ones((2, 3), np.float32))
    for array in (x.numpy(), x[0].numpy(), np.asarray(x.T), (x > 0).numpy()):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    values = np.float64([[1.0, 2.0], [3.0, 4.0]])
    for make in (ours.from_numpy, ours.as_tensor):
        tensor, wanted = make(values), values * 2
        tensor.mul_(2.0)
        assert np.array_equal(values, wanted)
        tensor[0][1] = -1
        assert values[0, 1] == -1


def test_an_element_in_several_places_is_not_written():
    with pytest.raises(ArgumentError, match=r"in place: expected a tensor whose elements are each in one place, got"):
        ours.zeros(1, 3).expand(2, 3).fill_(1.0)


def test_a_view_that_a_write_has_made_unreadable_says_so_at_every_read():
    """A second read of an overlapping view on the tape had the values of before the write."""
    whole = ours.tensor([[1.5, -1.25]], requires_grad=True)
    view = whole.expand(2, 2)
    with ours.no_grad():
        view.narrow(0, 0, 1).clip_(0, 1)
    for _ in range(3):
        with pytest.raises(ArgumentError, match="in place: expected a tensor whose elements are each in one place"):
            view.tolist()


#: Calls of tensors' methods are tried with these arguments, and those that both libraries take are compared.
ARGUMENTS = ("", "0", "1", "2", "1.0", "0, 0", "0, 1", "1, 1", "(0,)", "x", "x, x", "[0]", "1, 2", "0, i", "x > 9", "3")
OTHERS = (
    "F.pad(x, (0, 0))", "F.unfold(im, 1)", "F.avg_pool2d(im, 1)", "F.max_pool2d(im, 1)", "F.pixel_shuffle(im, 1)",
    "torch.cat([x])", "torch.stack([x])", "torch.einsum('ij->ji', x)", "x ** 1", "x * 1", "x + 0", "x[[0, 1]]",
    "torch.rot90(x, 4)", "torch.roll(x, 0)", "x[:1].sum(0)", "x[:1].mean(0)", "x[0, 0].sum()", "torch.tile(x, (1,))",
    "nn.Flatten()(im)", "torch.broadcast_tensors(x, x)[0]", "torch.meshgrid(x[0], x[0])[0]", "torch.as_tensor(x)",
)  # fmt: skip


MEMORIES = (lambda x: x.untyped_storage().data_ptr(), lambda x: id(root_of(x).buffer))


def test_results_share_memory_and_are_the_tensor_itself_where_pytorchs_are(torch):
    names = [each.name for each in registry.entries() if each.is_method]
    names += ["contiguous", "float", "detach", "expand_as", "view_as", "t", "long", "clone", "unfold", "T", "mT"]
    compared = 0
    for call in (*(f"x.{name}({given})" for name in names for given in ARGUMENTS), *OTHERS):
        shares = []
        for library, memory in zip((torch, ours), MEMORIES, strict=True):
            x, im = (library.ones(*shape) for shape in ((2, 4), (1, 1, 4, 4)))
            i, F = library.tensor([0, 1]), library.nn.functional
            try:
                result = eval(call, {"torch": library, "nn": library.nn, "F": F, "x": x, "im": im, "i": i})
                result = result[0] if isinstance(result, (list, tuple)) else result
                shares.append([any(memory(result) == memory(each) for each in (x, im, i)), result is x])
            except Exception:  # one of both does not take it
                break
        compared += len(shares) == 2
        assert len(shares) < 2 or shares[0] == shares[1], call
    assert compared > 300
