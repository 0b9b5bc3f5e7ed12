"""Where in the program a thread is."""

from __future__ import annotations

import gc
import sys
import threading

from clcomm.comm.watch.stall_message import place_of_frame, place_of_thread, stack_of_thread


def test_the_place_is_the_programs_not_a_librarys() -> None:
    frame = sys._getframe()

    class Sorted:
        def __lt__(self, other):
            self.place = place_of_frame(sys._getframe())
            return False

    element = Sorted()
    min([Sorted(), element])
    line = f"test_source_location.py:{frame.f_lineno - 1}"
    assert line in element.place and element.place.startswith("job/test_source_location.py:")
    assert place_of_frame(None) == ""


def test_no_garbage_is_collected_while_another_threads_frames_are_looked_at(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(
        "clcomm.comm.watch.stall_message.place_of_frame", lambda frame: seen.append((frame, gc.isenabled())) or "here"
    )
    assert place_of_thread(threading.get_ident()) == "here"
    ((frame, was_collecting),) = seen
    assert frame is not None and not was_collecting and gc.isenabled()
    gc.disable()
    try:
        place_of_thread(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_threads_stack_is_told_as_a_traceback_tells_it() -> None:
    stack = stack_of_thread(threading.get_ident())
    assert any("in test_a_threads_stack_is_told_as_a_traceback_tells_it" in line for line in stack)
    assert stack_of_thread(-1) == []
