"""What several test files use."""

from __future__ import annotations

from clcomm import ClcommError


def one_line(caught) -> str:
    """Return the text of a caught clcomm error, which has to be one line."""
    assert isinstance(caught.value, ClcommError)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.events = []

    def collective_finished(self, event):
        self.events.append(event)
