"""clcomm's environment variables: invalid values, unusable paths, unknown names."""

from __future__ import annotations

import os
from collections.abc import Iterator

from clcomm.base.console.finding import Finding, note, ok, problem
from clcomm.base.host import variables
from clcomm.tools.doctor.job import JobFacts

_REMEDY = "correct it, or unset it for its default (docs/environment.md)"
_PAGE = "docs/environment.md lists clcomm's"


def probe() -> dict[str, object]:
    """Return the set variables, the errors in their values, and the unknown names."""
    given = {name: variables.text(name) for name in variables.VARIABLES if name in os.environ}
    wrong = {name: variables.problem(name) or _unusable(name) for name in given}
    return {"given": given, "wrong": {name: why for name, why in wrong.items() if why}, "unknown": variables.unknown()}


def _unusable(name: str) -> str:
    """Return the reason why no file can be written at a variable's path, without a try; "": none."""
    path = variables.text(name)
    if not path or variables.VARIABLES[name].type != variables.FILE:
        return ""
    above = os.path.abspath(path)
    while not os.path.lexists(above):  # missing folders are made
        above = os.path.dirname(above)
    is_file = os.path.isfile(above) and above == os.path.abspath(path)
    if os.access(above, os.W_OK) and (is_file or (os.path.isdir(above) and above != os.path.abspath(path))):
        return ""
    return f"{name}={path}: no file can be written there, as {above} is in the way or not writable"


def check(job: JobFacts) -> Iterator[Finding]:
    """Report the errors in the ranks' variables, each statement once with its ranks."""
    wrong: dict[tuple[str, str], list[int]] = {}
    unknown: dict[tuple[str, str], list[int]] = {}
    for rank, facts in job.of("variables").items():
        for found, into in ((facts["wrong"], wrong), (facts["unknown"], unknown)):
            for name, text in found.items():
                into.setdefault((name, text), []).append(rank)
    for (name, text), ranks in wrong.items():
        yield problem("variables", f"{job.who(ranks)}{text}", _REMEDY, variable=name)
    for (name, meant), ranks in unknown.items():
        what = f"{job.who(ranks)}{name}: nothing reads a variable of this name"
        if meant.startswith(variables.START):
            yield problem("variables", what, f"unset {name}; did you mean {meant}?", variable=name, meant=meant)
        elif meant:
            remedy = f"unset {name}; it is an argument of the program: {meant}"
            yield problem("variables", what, remedy, variable=name, meant=meant)
        else:
            yield note("variables", what, f"unset {name}, if it is meant for clcomm: {_PAGE}", variable=name)
    everyone = job.of("variables")
    if everyone and not wrong and not unknown:
        names = sorted({name for facts in everyone.values() for name in facts["given"]})
        yield ok("variables", f"{', '.join(names)}: each has a value of its type" if names else "none of clcomm's set")
