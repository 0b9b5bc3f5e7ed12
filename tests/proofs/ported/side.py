"""Runs one script on one side, and writes the losses of which it called `backward()`.

`python -m tests.proofs.ported.side torch|clcomm SCRIPT FILE LOSSES ARGUMENTS...`, in the script's folder.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any


class Enough(BaseException):
    """Ends a script once it has computed the losses that are compared."""


def record(kind: type, losses: list[float], most: int) -> None:
    """Let `backward()` of tensors of a kind append the tensor's value, and end the script after the last."""
    backward: Any = kind.backward  # type: ignore[attr-defined]

    def noting(loss: Any, *args: Any, **named: Any) -> None:
        losses.append(float(loss.item()))
        if len(losses) >= most:
            raise Enough
        backward(loss, *args, **named)

    kind.backward = noting  # type: ignore[attr-defined]


def main() -> None:
    side, script, file, most, *arguments = sys.argv[1:]
    sys.path[:0] = [str(Path(script).parent), str(Path(script).parent.parent / "stand_ins")]
    losses: list[float] = []
    if side != "clcomm":
        import torch

        torch.set_num_threads(1)
        if side == "torch-otherwise":
            torch.backends.mkldnn.enabled = False
        record(torch.Tensor, losses, int(most))
    else:
        from clcomm.engine import Tensor

        record(Tensor, losses, int(most))
    sys.argv = [script, *arguments]
    with contextlib.suppress(Enough):
        runpy.run_path(script, run_name="__main__")
    Path(file).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
