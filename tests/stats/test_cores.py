"""Which CPUs a process may use, and how long its thread waited for one, phase by phase."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm.comm.stats import Phase, cores


@pytest.fixture
def waited(monkeypatch, tmp_path):
    """Return a function that sets the nanoseconds that the system says the thread has waited so far."""
    file = tmp_path / "schedstat"

    def write(wait_ns: int) -> None:
        file.write_text(f"123456789 {wait_ns} 42\n")

    write(7_000_000)  # what passed before the observer was made
    monkeypatch.setattr(cores, "_SCHEDSTAT", str(file))
    return write


def test_each_phase_gets_the_wait_since_the_one_before(waited):
    observer = cores.CoreWaits()
    for wait_ns, name, seconds in [
        (9_000_000, "data", 0.010),
        (9_500_000, "forward_backward", 0.020),
        (9_500_000, "data", 0.010),
        (19_500_000, "sync", 0.004),  # no longer than the phase
    ]:
        waited(wait_ns)
        observer.phase_finished(Phase(name, 0.0, seconds))
    assert observer.seconds == pytest.approx({"data": 0.002, "forward_backward": 0.0005, "sync": 0.004})


def test_phases_that_hold_others_or_are_too_short_are_left_to_those_that_count(waited):
    observer = cores.CoreWaits()
    waited(8_000_000)
    for name, seconds in [("step", 1.0), ("epoch", 9.0), ("pack", 1.0), ("unpack", 1.0), ("optimizer", 5e-5)]:
        observer.phase_finished(Phase(name, 0.0, seconds))
    assert observer.seconds == {}
    observer.phase_finished(Phase("forward_backward", 0.0, 0.5))
    assert observer.seconds == pytest.approx({"forward_backward": 0.001})


@pytest.mark.parametrize("steps", [1, 8, 9, 60])
@pytest.mark.parametrize("step_s", [0.003, 0.03])
def test_short_steps_that_are_measured_stand_for_all(waited, steps, step_s):
    """Each step waits for a fourth of its phase; where it is short, no more than one in 8 is read."""
    observer, wait_ns, reads = cores.CoreWaits(), 7_000_000, []
    reading, observer._read = observer._read, lambda: (reads.append(1), reading())[1]
    for _ in range(steps):
        wait_ns += int(step_s * 0.25e9)
        waited(wait_ns)
        observer.phase_finished(Phase("forward_backward", 0.0, step_s))
        observer.phase_finished(Phase("step", 0.0, step_s))
    assert observer.seconds == pytest.approx({"forward_backward": steps * step_s / 4})
    assert len(reads) == steps if step_s > 0.02 else len(reads) <= 2 * (1 + steps // 7)


def test_where_the_system_does_not_say_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(cores, "_SCHEDSTAT", str(tmp_path / "none"))
    observer = cores.CoreWaits()
    observer.phase_finished(Phase("data", 0.0, 1.0))
    assert observer.seconds is None


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_of_cpus_are_read_as_they_are_written(numbers):
    patch = pytest.MonkeyPatch()
    with patch.context() as given_numbers:
        given_numbers.setattr(os, "sched_getaffinity", lambda _: numbers, raising=False)  # Linux alone has it
        assert cores.parse_cpus(cores.allowed_cpus()) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-99999", "²"])
def test_what_is_no_list_of_cpus_is_refused(text):
    with pytest.raises(ValueError, match=r"^expected CPUs such as 0-3,8, got "):
        cores.parse_cpus(text)
