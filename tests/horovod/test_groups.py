"""Groups of gradients: the same bits as without, in as many all-reduces as there are groups."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.horovod.test_optimizer import Signs  # noqa: E402
from tests.horovod.training import OPTIMIZERS, STEPS, batch_of, bits_of, net, reference  # noqa: E402
from tests.horovod.values import same_bits  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=1)


def groupings(model):
    """Return arguments of the optimizer, and the places of the parameters in each group, by name."""
    own = list(model.parameters())
    return {
        "none": ({"groups": 0, "num_groups": 3}, None),
        "one": ({"groups": 1}, [[0, 1, 2, 3, 4, 5]]),
        "uneven": ({"num_groups": 4}, [[0, 1], [2, 3], [4], [5]]),
        "more than parameters": ({"groups": 9}, [[0], [1], [2], [3], [4], [5]]),
        "lists": ({"groups": [[own[0], own[5]], [own[4], own[2]]]}, [[0, 5], [1], [2, 4], [3]]),
        "a list of all, and strangers": (
            {"groups": [[], [*own, torch.nn.Parameter(torch.ones(3))]]}, [[0, 1, 2, 3, 4, 5]],
        ),
    }  # fmt: skip


class Buckets:
    """Collects the bytes of the gradients' all-reduces, by bucket."""

    def __init__(self):
        self.seen: list[tuple[int, int]] = []

    def collective_finished(self, event):
        if event.label == "gradients":
            self.seen.append((event.bucket, event.nbytes))


def train(hvd, model, optimizer, passes=1, dtype=torch.float32):
    seen = Buckets()
    hvd.communicator().add_observer(seen)
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(step * passes, (step + 1) * passes):
            model(batch_of(hvd.rank(), each, dtype)).square().sum().backward()
        optimizer.step()
    return list(seen.seen)


@pytest.mark.parametrize("kind", groupings(net()))
@pytest.mark.parametrize(("op", "passes", "halves"), [("Average", 1, False), ("Sum", 2, False), ("Average", 1, True)])
def test_groups_are_reduced_at_once_and_change_no_bit(hvd, kind, op, passes, halves):
    model = net()
    options, groups = groupings(model)[kind]
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model.parameters()), op=getattr(hvd, op), backward_passes_per_step=passes,
        compression=hvd.Compression.fp16 if halves else hvd.Compression.none, **options,
    )  # fmt: skip
    seen = train(hvd, model, optimizer, passes)
    assert same_bits(bits_of(model), bits_of(reference("adam", hvd.size(), torch.float32, op, passes, halves)))
    if hvd.size() > 1:
        lengths, width = [each.numel() for each in model.parameters()], 2 if halves else 4
        nbytes = [width * sum(lengths[place] for place in group) for group in reversed(groups or [range(6)])]
        nbytes[0] += width  # whether the rank takes part
        assert seen == STEPS * list(enumerate(nbytes))


def test_a_group_of_two_dtypes_is_two_all_reduces(hvd):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).double(), torch.nn.Linear(3, 2)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0), op=hvd.Sum, groups=1)
    seen = Buckets()
    hvd.communicator().add_observer(seen)
    before = [each.detach().clone() for each in model.parameters()]
    for layer in model:
        (layer(torch.ones(1, 3, dtype=layer.weight.dtype)) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    total = sum(range(1, hvd.size() + 1))
    for old, each in zip(before, model.parameters(), strict=True):
        assert torch.allclose(old - each, torch.full_like(each, total), rtol=1e-6)
    if hvd.size() > 1:
        assert sorted(nbytes for _, nbytes in seen.seen) == [16 * 4, 8 * 8 + 8]  # and whether the rank takes part


@pytest.mark.parametrize("kind", ["adasum", "compressor"])
@pytest.mark.parametrize("groups", [2, 6])
def test_groups_of_steps_and_of_compressed_gradients_change_no_bit(hvd, kind, groups):
    found = []
    for given in (0, groups):
        model = net()
        options = {"op": hvd.Adasum} if kind == "adasum" else {"op": hvd.Sum, "compression": Signs}
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), groups=given, **options)
        seen = train(hvd, model, optimizer)
        found.append((bits_of(model), seen))
    assert same_bits(found[0][0], found[1][0])
    if hvd.size() > 1:
        assert [len(seen) for _, seen in found] == [STEPS, groups * STEPS]
