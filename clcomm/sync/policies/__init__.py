"""Policies of training that talks rarely: ranks take steps of their own, and exchange parameters now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clcomm.base.errors import ArgumentError

if TYPE_CHECKING:
    from clcomm.sync.policies.policy import Policy


def parse_policy(text: str) -> Policy | None:
    """Return the policy of "none", "local:h=8", "diloco:h=50,lr=0.7", "streaming", "sparseloco" or "noloco:h=8".

    None: gradients are averaged in each step. Settings that the text leaves out have defaults. Raises ArgumentError.
    """
    if text == "none":
        return None
    from clcomm.sync.policies.choose import POLICIES  # here, as most programs have none
    from clcomm.sync.policies.policy import parse_settings

    name, _, settings = text.partition(":") if isinstance(text, str) else ("", "", "")
    kind = next((kind for kind in POLICIES if kind.name == name), None)
    if kind is None:
        names = ", ".join(kind.name for kind in POLICIES)
        raise ArgumentError(f"policy: expected none or one of {names}, with settings such as diloco:h=50, got {text!r}")
    return parse_settings(kind, settings)
