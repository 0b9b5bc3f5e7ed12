"""The flat space: properties of offsets and buckets, for any list of parameters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import ALIGNMENT, FlatLayout, shard_bounds
from clcomm.base.flat_space.parameters import ParameterSpec

DTYPES = ("float16", "float32", "float64", "complex64")
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@st.composite
def spec_lists(draw, min_size=0):
    drawn = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=min_size, max_size=12))
    return [ParameterSpec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]


sizes = st.one_of(st.integers(1, 4000), st.integers(1, 1 << 20))


def convnet_specs() -> list[ParameterSpec]:
    """LizarDist's ConvNet: 1-16-32 channels, 3x3, then 1568-128-10."""
    shapes = [(16, 1, 3, 3), (16,), (32, 16, 3, 3), (32,), (128, 1568), (128,), (10, 128), (10,)]
    return [ParameterSpec(f"layer{i // 2}.{'weight' if i % 2 == 0 else 'bias'}", s) for i, s in enumerate(shapes)]


# --- ranges ---


@given(spec_lists(), st.sampled_from([16, 64, 128, 512, 4096]))
def test_ranges_are_aligned_and_do_not_overlap(specs, alignment):
    layout = FlatLayout(specs, alignment)
    for place in layout.ranges:
        assert place.start % alignment == 0
        assert place.stop - place.start == place.nbytes == np.empty(place.shape, place.dtype).nbytes
    for one, other in itertools.pairwise(layout.ranges):
        assert one.stop <= other.start < one.stop + alignment  # padding, but never a whole alignment of it
    assert layout.span % alignment == 0
    assert layout.span >= max(alignment, *(place.stop for place in layout.ranges), 0)


@given(spec_lists())
def test_ranges_are_in_reverse_order_of_the_parameters(specs):
    layout = FlatLayout(specs)
    assert [place.spec for place in layout.ranges] == specs[::-1]
    assert layout.specs == tuple(specs)
    assert layout.nbytes == sum(spec.nbytes for spec in specs)


@given(spec_lists(min_size=1))
def test_views_hold_each_parameter_and_touch_nothing_else(specs):
    layout = FlatLayout(specs)
    flat = np.zeros(layout.span, np.uint8)
    for number, spec in enumerate(specs, 1):
        view = layout.view(flat, spec.name)
        assert (view.shape, view.dtype) == (spec.shape, np.dtype(spec.dtype))
        view[...] = number
    for number, spec in enumerate(specs, 1):
        assert (layout.view(flat, spec.name) == number).all()
    for place in layout.ranges:
        flat[place.start : place.stop] = 0
    assert not flat.any(), "padding was written"


def test_without_parameters_there_is_still_a_space():
    layout = FlatLayout([])
    assert (layout.ranges, layout.nbytes, layout.span) == ((), 0, ALIGNMENT)
    assert layout.buckets(1024) == layout.buckets(None) == ()


# --- buckets ---


@given(spec_lists(), sizes)
def test_buckets_hold_every_slot_once_and_in_order(specs, bucket_size):
    layout = FlatLayout(specs)
    for size in (bucket_size, None):
        buckets = layout.buckets(size)
        assert [place for bucket in buckets for place in bucket.ranges] == list(layout.ranges)
        assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
        assert sum(bucket.nbytes for bucket in buckets) == layout.nbytes
        for one, other in itertools.pairwise(buckets):
            assert one.stop <= other.start


@given(spec_lists(min_size=1), sizes)
def test_buckets_keep_to_their_size_in_the_parameters_own_bytes(specs, bucket_size):
    buckets = FlatLayout(specs).buckets(bucket_size)
    for bucket in buckets:
        assert bucket.nbytes == sum(place.nbytes for place in bucket.ranges)
        assert bucket.nbytes <= bucket_size or len(bucket.ranges) == 1
    for one, other in itertools.pairwise(buckets):  # no bucket ends before it has to
        assert one.nbytes + other.ranges[0].nbytes > bucket_size or one.dtype != other.dtype


@given(spec_lists(min_size=1), sizes)
def test_a_bucket_never_mixes_dtypes_and_views_as_its_own(specs, bucket_size):
    layout = FlatLayout(specs)
    flat = np.zeros(layout.span, np.uint8)
    for bucket in layout.buckets(bucket_size):
        assert {place.dtype for place in bucket.ranges} == {bucket.dtype}
        values = flat[bucket.start : bucket.stop].view(bucket.dtype)
        assert values.nbytes >= bucket.nbytes


@given(spec_lists())
def test_per_tensor_is_one_bucket_for_each(specs):
    layout = FlatLayout(specs)
    assert [bucket.ranges for bucket in layout.buckets(None)] == [(place,) for place in layout.ranges]


def test_padding_does_not_fill_a_bucket():
    layout = FlatLayout([ParameterSpec(f"b{i}", (2,)) for i in range(4)])  # 8 bytes each, 512 apart
    assert [len(bucket.ranges) for bucket in layout.buckets(16)] == [2, 2]
    assert [bucket.nbytes for bucket in layout.buckets(16)] == [16, 16]


# --- a first bucket of another size, split tensors, the order of completion ---


@st.composite
def cuts(draw):
    """Draw a layout and how to cut it: (layout, arguments of `buckets`)."""
    specs = draw(spec_lists(min_size=1))
    arguments = {
        "bucket_size": draw(sizes),
        "first_bucket_size": draw(st.none() | sizes),
        "split_tensors": draw(st.booleans()),
        "order": draw(st.permutations([spec.name for spec in specs]).map(lambda o: o[: len(o) - len(o) // 3])),
    }
    return FlatLayout(specs), arguments


@given(cuts())
def test_every_byte_is_in_one_bucket_however_it_is_cut(cut):
    layout, arguments = cut
    buckets = layout.buckets(**arguments)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    covered = np.zeros(layout.span, np.uint8)
    for bucket in buckets:
        covered[bucket.start : bucket.stop] += 1
    for place in layout.ranges:
        assert (covered[place.start : place.stop] == 1).all()
    assert covered.max(initial=0) <= 1, "padding counts once too"
    assert sum(bucket.nbytes for bucket in buckets) == layout.nbytes


@given(cuts())
def test_each_gradient_opens_in_one_bucket_and_closes_in_one_that_is_not_earlier(cut):
    layout, arguments = cut
    buckets = layout.buckets(**arguments)
    opened = [(place.name, bucket.index) for bucket in buckets for place in bucket.opening]
    closed = {place.name: bucket.index for bucket in buckets for place in bucket.closing}
    assert sorted(name for name, _ in opened) == sorted(place.name for place in layout.ranges)
    assert all(index <= closed[name] for name, index in opened)
    for bucket in buckets:
        assert {place.dtype for place in bucket.ranges} == {bucket.dtype}
        assert bucket.ranges[0].start <= bucket.start <= bucket.stop <= bucket.ranges[-1].stop


@given(cuts())
def test_sizes_are_kept_to_where_tensors_may_be_split(cut):
    layout, arguments = cut
    buckets = layout.buckets(**{**arguments, "split_tensors": True, "first_bucket_size": None})
    assert all(bucket.nbytes <= max(arguments["bucket_size"], ALIGNMENT) for bucket in buckets)


@given(spec_lists(min_size=1), sizes, sizes)
def test_the_first_bucket_has_a_size_of_its_own(specs, first_bucket_size, bucket_size):
    layout = FlatLayout(specs)
    first, *rest = layout.buckets(bucket_size, first_bucket_size=first_bucket_size)
    assert first.nbytes <= first_bucket_size or len(first.ranges) == 1
    assert all(bucket.nbytes <= bucket_size or len(bucket.ranges) == 1 for bucket in rest)
    assert [place for bucket in (first, *rest) for place in bucket.ranges] == list(layout.ranges)


@given(spec_lists(min_size=1), sizes)
def test_the_layouts_own_order_changes_nothing(specs, bucket_size):
    layout = FlatLayout(specs)
    names = [place.name for place in layout.ranges]
    assert layout.buckets(bucket_size, order=names) == layout.buckets(bucket_size)


def test_weights_that_are_complete_before_their_biases_change_nothing():
    """As in backward of a linear layer: the order differs, but no bucket is complete much sooner."""
    layout = FlatLayout(convnet_specs())
    names = [place.name for place in layout.ranges]
    swapped = [names[at ^ 1] for at in range(len(names))]
    for bucket_size in (1 << 20, 256 << 10, None):
        assert layout.buckets(bucket_size, order=swapped) == layout.buckets(bucket_size)


def test_what_is_complete_last_does_not_hold_up_its_neighbours():
    """A tensor at the layout's begin that backward needs to its end: as an embedding that is also the last layer."""
    layout = FlatLayout([ParameterSpec(name, (64,)) for name in ("a", "b", "c", "tied")])  # 256 bytes each
    assert [place.name for place in layout.ranges] == ["tied", "c", "b", "a"]
    assert [len(bucket.ranges) for bucket in layout.buckets(512)] == [2, 2]
    names = [[place.name for place in b.ranges] for b in layout.buckets(512, order=["c", "b", "a", "tied"])]
    assert names == [["c", "b"], ["a"], ["tied"]]  # the last two would fit together, but are no neighbours


def test_a_tensor_is_split_at_multiples_of_the_alignment():
    layout = FlatLayout([ParameterSpec("small", (10,)), ParameterSpec("large", (1000,))])  # 40 and 4,000 bytes
    buckets = layout.buckets(1500, split_tensors=True)
    assert [(b.start, b.stop, b.nbytes) for b in buckets] == [
        (0, 1024, 1024), (1024, 2048, 1024), (2048, 3072, 1024), (3072, 4136, 968),
    ]  # fmt: skip
    assert [[place.name for place in b.ranges] for b in buckets] == [["large"]] * 3 + [["large", "small"]]


# --- LizarDist's published numbers ---


def test_lizardists_convnet():
    layout = FlatLayout(convnet_specs())
    assert len(layout.ranges) == 8
    assert layout.nbytes == 827_688
    assert [bucket.nbytes for bucket in layout.buckets(1 << 20)] == [827_688]
    per_tensor = layout.buckets(None)
    assert len(per_tensor) == 8
    assert sum(bucket.nbytes for bucket in per_tensor) / 8 == 103_461
    # the one large weight exceeds 256 KiB and stands alone; the rest fit before and behind it
    assert [len(bucket.ranges) for bucket in layout.buckets(256 << 10)] == [3, 1, 4]


# --- signature and refusals ---


@given(spec_lists(min_size=1))
def test_a_signature_changes_with_anything_that_matters(specs):
    signature = FlatLayout(specs).signature()
    assert signature == FlatLayout(list(specs)).signature()
    first, *rest = specs
    changed = [
        ParameterSpec(first.name + "x", first.shape, first.dtype),
        ParameterSpec(first.name, (*first.shape, 1), first.dtype),
        ParameterSpec(first.name, first.shape, "float32" if first.dtype != "float32" else "float64"),
    ]
    for other in changed:
        assert FlatLayout([other, *rest]).signature() != signature
    assert FlatLayout([*specs, ParameterSpec("another", (1,))]).signature() != signature
    assert FlatLayout(rest).signature() != signature


def test_a_name_used_twice_is_refused():
    with pytest.raises(ArgumentError, match=r"^parameters: expected different names, got 'w' twice$"):
        FlatLayout([ParameterSpec("w", (1,)), ParameterSpec("w", (2,))])


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ArgumentError, match=r"^parameter 'w': unknown dtype 'float33'$"):
        FlatLayout([ParameterSpec("w", (1,), "float33")])


@pytest.mark.parametrize("alignment", [0, 1, 8, 24, 100, -512])
def test_an_alignment_that_no_device_can_use_is_refused(alignment):
    with pytest.raises(ArgumentError, match=rf"^alignment: expected a power of two .* got {alignment}$"):
        FlatLayout([], alignment)


# --- shards ---


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([1, 4, 16, 128]))
def test_shards_cover_everything_evenly(count, shards, multiple):
    bounds = shard_bounds(count, shards, multiple)
    assert len(bounds) == shards + 1
    assert (bounds[0], bounds[-1]) == (0, count)
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert min(lengths) >= 0
    assert all(start % multiple == 0 or start == count for start in bounds[:-1])
    assert max(lengths) - min(lengths[:-1] or lengths) <= multiple
    assert max(lengths) < count / shards + multiple + 1
