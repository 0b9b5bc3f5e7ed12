from hypothesis import given
from hypothesis import strategies as st

from clcomm.engine.recording import Lifetime, plan_arena

LIFETIMES = st.builds(
    lambda nbytes, first, length: Lifetime(nbytes, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 10),
)


@given(st.lists(LIFETIMES, max_size=40), st.sampled_from([1, 128, 512]))
def test_buffers_in_use_together_lie_apart(lifetimes, alignment):
    offsets, total = plan_arena(lifetimes, alignment)
    spans = [(offset, offset + one.nbytes, one) for offset, one in zip(offsets, lifetimes, strict=True)]
    assert total == max((stop for _, stop, _ in spans), default=0)
    for index, (start, stop, one) in enumerate(spans):
        assert start % alignment == 0
        for other_start, other_stop, other in spans[:index]:
            if one.first <= other.last and other.first <= one.last:
                assert stop <= other_start or other_stop <= start


@given(st.lists(LIFETIMES, min_size=1, max_size=40))
def test_the_arena_is_no_larger_than_all_buffers_and_no_smaller_than_those_of_one_launch(lifetimes):
    _, total = plan_arena(lifetimes, 1)
    needed = [sum(one.nbytes for one in lifetimes if one.first <= at <= one.last) for at in range(41)]
    assert max(needed) <= total <= sum(one.nbytes for one in lifetimes)


def test_a_chain_needs_two_places():
    chain = [Lifetime(1000, at, at + 1) for at in range(20)]
    assert plan_arena(chain, 1)[1] == 2000
