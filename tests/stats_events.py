"""Made-up calls and phases, drawn ones among them, and the stats of them."""

from __future__ import annotations

from hypothesis import strategies as st

from clcomm.comm.stats.comm_stats import Collective, CommStats, Phase


def event(seconds=0.001, nbytes=1000, operation="all_reduce", label="", failed=False, bucket=-1, **more):
    return Collective(operation, label, nbytes, seconds, "solo", 1, failed, bucket=bucket, **more)


def stats_of(events, world_size=4):
    stats = CommStats(world_size)
    for each in events:
        (stats.phase_finished if isinstance(each, Phase) else stats.collective_finished)(each)
    return stats


durations = st.floats(1e-7, 90.0)

events = st.builds(
    event,
    seconds=durations,
    nbytes=st.integers(0, 1 << 30),
    operation=st.sampled_from(["all_reduce", "broadcast", "barrier"]),
    label=st.sampled_from(["", "gradients"]),
    failed=st.booleans(),
    bucket=st.integers(-1, 2),
    wait_s=st.none() | st.floats(0, 1e-7),
    exposed_s=st.none() | st.floats(0, 1e-7),
    last_rank=st.integers(-1, 3),
    late_s=st.floats(0, 1),
)

phases = st.builds(
    Phase,
    st.sampled_from(["pack", "unpack", "step"]),
    st.just(0.0),
    durations,
    bucket=st.integers(-1, 2),
    communication_s=durations,
)
