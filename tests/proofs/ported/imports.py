"""The imports of a script for PyTorch, as the engine has them: the table of docs/ported.md."""

from __future__ import annotations

import re

#: A line of PyTorch's, and the engine's.
LINES = (
    (r"import torch as (\w+)", r"import clcomm.as_torch as \1"),
    (r"import torch", "import clcomm.as_torch as torch"),
    (r"import torch\.nn\.functional as (\w+)", r"from clcomm.engine import functional as \1"),
    (r"import torch\.nn\.init as (\w+)", r"from clcomm.engine.nn import init as \1"),
    (r"import torch\.nn as (\w+)", r"from clcomm.engine import nn as \1"),
    (r"import torch\.optim as (\w+)", r"from clcomm import optim as \1"),
    (r"import torch\.(?:utils\.data|nn|optim|nn\.functional|onnx|nn\.parallel)", "import clcomm.as_torch as torch"),
    (r"import torch\.backends\.cudnn as (\w+)", r"from clcomm.as_torch import backends as \1"),
    (r"import torch\.autograd as (\w+)", r"from clcomm.as_torch import autograd as \1"),
    (r"from torch import (.+)", r"from clcomm.as_torch import \1"),
    (r"from torch\.autograd import (.+)", r"from clcomm.as_torch import \1"),
    (r"from torch\.nn import functional as (\w+)", r"from clcomm.engine import functional as \1"),
    (r"from torch\.nn import (.+)", r"from clcomm.engine.nn import \1"),
    (r"from torch\.nn\.functional import (.+)", r"from clcomm.engine.functional import \1"),
    (r"from torch\.nn\.(utils[\w.]*) import (.+)", r"from clcomm.engine.nn.\1 import \2"),
    (r"from torch\.optim import (.+)", r"from clcomm.optim import \1"),
    (r"from torch\.optim\.lr_scheduler import (.+)", r"from clcomm.optim.lr_scheduler import \1"),
    (r"from torch\.utils\.data import (.+)", r"from clcomm.as_torch.data import \1"),
    (r"from torch\.utils\.data\.dataloader import (.+)", r"from clcomm.as_torch.data import \1"),
    (r"from torch\.utils\.checkpoint import (.+)", r"from clcomm.engine.recomputation import \1"),
    (r"from torch\.distributions import (.+)", r"from clcomm.as_torch.distributions import \1"),
)  # fmt: skip


def moved(text: str) -> tuple[str, int]:
    """Return a script with the engine's imports, and how many lines that changed."""
    lines, changed = text.split("\n"), 0
    for number, line in enumerate(lines):
        for theirs, ours in LINES:
            found = re.fullmatch(rf"(\s*){theirs}(\s*#.*)?", line)
            if found:
                named = re.sub(rf"^{theirs}$", ours, line.strip().partition("#")[0].strip())
                lines[number] = found[1] + re.sub(r"import (\w+) as \1$", r"import \1", named)
                changed += 1
                break
    return "\n".join(lines), changed
