"""The exit codes of all programs, in words; docs/exit-codes.md lists their causes."""

from __future__ import annotations

EXIT_CODES: dict[int, str] = {
    0: "success",
    1: "a failure that may not occur again, or a finding: clcomm doctor's or verify's, clcomm report's file left out",
    2: "a mistake that another start would repeat: an option, a file, a device, ranks that differ",
    3: "the run is complete, but below its target: --target-accuracy, --fail-if-slower",
    124: "a rank or its end took longer than its time limit",
    127: "clcomm run cannot start the command",
    130: "interrupted: SIGINT, Ctrl-C",
    143: "ended by SIGTERM",
}
