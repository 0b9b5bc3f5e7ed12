"""`clcomm demo`: a training that loses ranks and keeps its bits, and a slow rank that is named, in a minute."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from clcomm.base.errors import ArgumentError, ClcommError
from clcomm.base.host.rank_process import launched_ranks
from clcomm.base.storage.files import check_writable, unwritable
from clcomm.comm.watch.running_jobs import find_jobs
from clcomm.tools.commands.command import Command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from clcomm.jobs.launch.keeper import Keeper

_SCRIPT = """\
import hashlib, os, sys, time
import numpy as np
{imports}
from clcomm.jobs import checkpoint

comm = {comm}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
ddp = clcomm.DistributedDataParallel(model, comm, shards=8)     # the same bits on any number of ranks
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Points(torch.utils.data.Dataset):
    points = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    def __len__(self):
        return len(self.points)
    def __getitem__(self, number):
        if os.environ.get("SLOW_RANK") == str(comm.rank):
            time.sleep(0.002)                                   # as a slow disk would
        return self.points[number], self.points[number, :8].argmax()

batches = ddp.batches(4096, batch_size=64, seed=1)
loader = torch.utils.data.DataLoader(Points(), batch_sampler=batches)
first = 0
if os.path.exists("state.npz"):
    saved = checkpoint.load("state.npz")
    first = saved.facts["epoch"]
    model.load_state_dict({{name: torch.as_tensor(each) for name, each in saved.arrays.items()}})
for epoch in range(first, int(sys.argv[1])):
    batches.set_epoch(epoch)
    for step, batch in enumerate(loader):
        for x, y in ddp.shards(batch):
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        clcomm.note_step(64 * epoch + step + 1)
    if comm.rank == 0:
        arrays = {{name: np.asarray(each) for name, each in model.state_dict().items()}}
        checkpoint.save("state.npz", checkpoint.Checkpoint(arrays, dict(epoch=epoch + 1)))
if comm.rank == 0:
    bits = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("SHA-256", hashlib.sha256(bits).hexdigest())
{end}"""
#: What differs with PyTorch, and without it, on clcomm's own engine.
_PYTORCH = {
    "imports": """\
import clcomm, clcomm.torch
import torch
torch.set_num_threads(1)
torch.distributed.init_process_group("clcomm")""",
    "comm": "clcomm.torch.communicator()",
    "end": "",
}
_ENGINE = {
    "imports": """\
import clcomm, clcomm.as_torch as torch
from clcomm.insight import report""",
    "comm": "clcomm.Communicator()",
    "end": """\
if "CLCOMM_REPORT" in os.environ:
    figures = report.run_document(report.gather_records(comm))
    report.write_document(os.environ["CLCOMM_REPORT"], figures, comm)
""",
}
_NAME, _STEPS, _LOOK_S = "train.py", 64, 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="half of the time, with fewer steps")
    parser.add_argument("-o", "--output", default="demo.html", metavar="OUT", help="the page; default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Show it; return 1 where the bits differ."""
    if launched_ranks() > 1:
        raise ArgumentError("demo: expected to be outside mpiexec, as it starts ranks itself, got a rank")
    try:
        check_writable(options.output)
    except OSError as error:
        raise unwritable("-o", options.output, error) from None
    from rich.syntax import Syntax

    from clcomm.base.console.output import make_console
    from clcomm.insight.report import build, read_runs
    from clcomm.jobs.launch.keeper import kept_job
    from clcomm.tools.commands.output import write_report

    console = make_console(highlight=False, soft_wrap=False)
    script = _SCRIPT.format(**_PYTORCH if importlib.util.find_spec("torch") else _ENGINE)
    with kept_job() as keeper:  # which ends the trainings where this process is killed
        demo = _Demo(console, keeper, 6 if options.quick else 24)
        saved = keeper.folder / "state.npz"
        (keeper.folder / _NAME).write_text(script, encoding="utf-8")
        console.print(f"This script trains a small network; it is {_NAME} below:\n", style="bold")
        console.print(Syntax(script, "python", background_color="default"))
        undisturbed = demo.train("1. Four ranks, which nobody disturbs", 4)
        steps = demo.epochs * _STEPS
        saved.unlink()
        demo.train("2. The same, but one rank is killed", 4, "--chaos", f"seed=1,at={steps // 3}", dies=True)
        killed = demo.train(
            "3. It goes on with three ranks, of which another one is killed", 3,
            "--restarts", "1", "--pause", "0", "--chaos", f"seed=2,at={steps * 2 // 3}",
        )  # fmt: skip
        console.print(f"SHA-256 of the parameters: {undisturbed}, undisturbed\n{killed:>91}, two ranks killed")
        same = bool(killed) and killed == undisturbed
        console.print(f"{'The same' if same else 'NOT the same'} bits.", style="bold green" if same else "bold red")
        saved.unlink()
        demo.epochs = 6  # its steps take long
        demo.train("4. Rank 1 reads its data slowly", 4, SLOW_RANK="1", CLCOMM_REPORT="report.json")
        report = build(read_runs([str(keeper.folder / "report.json")]))
        console.print("\n".join(report.headline), style="bold green")
        write_report(report, "html", options.output)
    console.print(
        f"\n{options.output} shows where the time went. For your own script:\n"
        "  clcomm verify train.py                             does it train on several ranks as on one?\n"
        "  CLCOMM_REPORT=run.json clcomm run -n 4 train.py    which rank is slow, and why?  clcomm report run.json\n"
        "  clcomm run -n 4 --restarts 3 --chaos seed=7,every=20s train.py    does it survive?"
    )
    return not same


class _Demo:
    """Runs the script in a folder and shows each rank's steps."""

    def __init__(self, console: Console, keeper: Keeper, epochs: int):
        self._console, self._folder, self.epochs = console, keeper.folder, epochs
        self._environment = keeper.environment()

    def train(self, title: str, ranks: int, *options: str, dies: bool = False, **variables: str) -> str:
        """Train on some ranks, with options of `clcomm run`, and return the SHA-256 of the parameters."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        command = [sys.executable, "-m", "clcomm", "run", "-n", str(ranks), *options, _NAME, str(self.epochs)]
        self._console.print(f"\n{title}\n", " ".join(["$ clcomm", *command[3:]]), style="bold")
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
        output = self._folder / "output.txt"
        with output.open("wb") as file, Progress(*columns, console=self._console) as shown:
            bars = [shown.add_task(f"rank {rank}", total=self.epochs * _STEPS) for rank in range(ranks)]
            process = subprocess.Popen(
                command, cwd=self._folder, env={**self._environment, **variables},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
            while process.poll() is None:
                self._look(shown, bars)
                time.sleep(_LOOK_S)
            if not process.returncode:
                for bar in bars:
                    shown.update(bar, completed=self.epochs * _STEPS)
        printed = output.read_text(errors="replace")
        for line in re.findall("^(?:clcomm|chaos): .*", printed, re.MULTILINE):
            self._console.print(line, style="yellow", markup=False)
        if bool(process.returncode) != dies:
            raise ClcommError(f"demo: a training ended with code {process.returncode}: {printed.strip()[-300:]!r}")
        found = re.search("SHA-256 ([0-9a-f]{64})", printed)
        return found[1] if found else ""

    def _look(self, shown: Progress, bars: list[TaskID]) -> None:
        """Set each rank's bar to the step that the rank wrote last on the job's status page."""
        for job in find_jobs()[0]:
            with suppress(OSError):  # it has ended meanwhile
                if Path(f"/proc/{job.pid}/cwd").samefile(self._folder):
                    for line in job.lines():
                        shown.update(bars[line.rank], completed=line.figures.get("step", 0))


COMMAND = Command(
    "demo",
    "see in a minute how a training loses ranks, keeps its bits, and names a slow rank",
    "Train a PyTorch script on 4 ranks of this host, or without PyTorch on clcomm's engine; kill two of its ranks, and "
    "go on with 3: the parameters end with the same SHA-256. Then slow a rank down: the report says which, and why.",
    add_arguments,
    run,
    (("clcomm demo", "about a minute on two cores"), ("clcomm demo --quick", "about half a minute")),
)
