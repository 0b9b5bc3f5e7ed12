"""Checkpoints of a job: one file of arrays and facts, copies in memory, and checks of the paths that are written."""

from clcomm.jobs.checkpoint.file import (
    Checkpoint,
    check_parameters,
    earlier,
    invalid_entry,
    load,
    save,
    whole_number,
)

__all__ = ["Checkpoint", "check_parameters", "earlier", "invalid_entry", "load", "save", "whole_number"]
