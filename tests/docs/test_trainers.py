"""The programs of tests/docs/trainers, which docs/pytorch-ddp.md names: they train as on gloo, bit for bit."""

from __future__ import annotations

import pytest

from tests.faults.launch import ROOT, job

PROGRAMS = {
    name: (ROOT / "tests" / "docs" / "trainers" / f"with_{name}.py").read_text()
    for name in ("accelerate", "transformers", "lightning")
}
#: Put before the end of a program: what it has trained, and how much went through clcomm.
REPORT = r"""
import hashlib, sys
import torch.distributed as dist
trained = torch.cat([each.detach().flatten() for each in getattr(model, "module", model).parameters()])
lines = ["parameters " + hashlib.sha256(trained.numpy().tobytes()).hexdigest(), "backend " + dist.get_backend()]
if "{backend}" == "clcomm":
    lines.append(f"reduced {{'all_reduce gradients' in str(clcomm.torch.communicator().stats.table())}}")
sys.stdout.write("\n".join(["", *lines, ""]))  # in one piece, whatever the library prints
sys.stdout.flush()
"""
END = "dist.destroy_process_group()\n"


@pytest.mark.parametrize(("name", "ranks"), [(name, 2) for name in PROGRAMS])  # two ranks' sums have one order on gloo
def test_a_trainer_s_program(tmp_path, name, ranks):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip(name, reason=f"{name} is not installed; pip install -e '.[trainers]'")
    program, trained = PROGRAMS[name].replace(END, ""), {}
    for backend in ("clcomm", "gloo"):
        script = program.replace('"clcomm"', f'"{backend}"') + REPORT.format(backend=backend) + END
        ended = job(tmp_path, script, ranks=ranks, HF_HUB_OFFLINE="1")
        assert ended.code == 0, ended.err
        lines = ended.out.splitlines()
        assert lines.count(f"backend {backend}") == ranks
        assert backend != "clcomm" or lines.count("reduced True") == ranks
        trained[backend] = {line for line in lines if line.startswith("parameters")}
        assert any(f"{ranks} " in line and "loss" in line for line in lines)
    assert len(trained["clcomm"]) == 1 and trained["clcomm"] == trained["gloo"]
