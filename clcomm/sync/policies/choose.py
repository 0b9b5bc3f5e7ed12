"""The policy that a text names."""

from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.sync.policies.gossip import NoLoCo
from clcomm.sync.policies.outer import DiLoCo, LocalSGD
from clcomm.sync.policies.policy import Policy, parse_settings
from clcomm.sync.policies.sparse import SparseLoCo
from clcomm.sync.policies.streaming import StreamingDiLoCo

POLICIES: tuple[type[Policy], ...] = (LocalSGD, DiLoCo, StreamingDiLoCo, SparseLoCo, NoLoCo)


def parse_policy(text: str) -> Policy | None:
    """Return the policy of "none", "local:h=8", "diloco:h=50,lr=0.7", "streaming", "sparseloco" or "noloco:h=8".

    None: gradients are averaged in each step. Settings that the text leaves out have defaults. Raises ArgumentError.
    """
    name, _, settings = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "none":
        return None
    kind = next((kind for kind in POLICIES if kind.name == name), None)
    if kind is None:
        names = ", ".join(kind.name for kind in POLICIES)
        raise ArgumentError(f"policy: expected none or one of {names}, with settings such as diloco:h=50, got {text!r}")
    return parse_settings(kind, settings)
