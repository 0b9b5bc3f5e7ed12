"""A rank of `clcomm verify`: runs the script with hooks, and waits at its end for the command's word.

`python -m clcomm.tools.verify.rank FOLDER STEPS (SCRIPT | -m MODULE) ARGUMENTS`
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from clcomm.jobs.launch import rank as launched
from clcomm.tools.verify import engine_hooks, torch_hooks
from clcomm.tools.verify.watcher import Finished, Watcher

#: Files by which the command tells ranks to go on to their ends, or to end at once; how often they look.
GO, ABORT, LOOK_S = "go", "abort", 0.05
#: How long a rank that is to end waits for the others' records.
TOGETHER_S = 5.0
#: What is done after a module's import.
HOOKS: dict[str, Callable[[ModuleType, Watcher], None]] = {
    "torch": torch_hooks.install,
    "clcomm.horovod.optimizer": torch_hooks.watch_horovod,
    "clcomm.horovod.join": torch_hooks.watch_join,
    "clcomm.engine.nn.module": engine_hooks.watch_modules,
    "clcomm.optim.optimizer": engine_hooks.watch_optimizers,
    "clcomm.sync.distributed_optimizer": engine_hooks.watch_distributed,
    "clcomm.sync.synchronizer": engine_hooks.watch_synchronizer,
    "clcomm.sync.clipping": engine_hooks.watch_clipping,
}


def main() -> None:
    """Run this process's command line."""
    folder, steps, *job = sys.argv[1:]
    os.environ["CLCOMM_REPLAY"] = "0"  # a replay calls none of the functions that are hooked; the bits are the same
    launched.start(job, around=partial(_watch, Path(folder), int(steps)))


def _watch(folder: Path, steps: int, script: Callable[[], None]) -> None:
    def finish() -> None:
        _wait(folder)
        raise Finished

    watcher = Watcher(int(os.environ["RANK"]), steps, folder, finish)
    watcher.write()
    install(watcher)
    threading.Thread(target=_end_when_told, args=(watcher, folder), daemon=True).start()
    try:
        script()
    except Finished:
        return
    except SystemExit as end:
        watcher.write_pending("error" if end.code else "end", f"exit code {end.code}")
    except BaseException as error:
        text = str(error).strip().splitlines() or [""]
        print(f"clcomm: rank {watcher.record.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        watcher.write_pending("error", f"{type(error).__name__}: {text[0]}")
    else:
        watcher.write_pending("end")
    _wait(folder)


def _wait(folder: Path) -> None:
    """Wait until all ranks are at their ends: one that left would end the others."""
    while not (folder / GO).exists():
        time.sleep(LOOK_S)


def _end_when_told(watcher: Watcher, folder: Path) -> None:
    while not (folder / ABORT).exists():
        time.sleep(LOOK_S)
    try:
        watcher.write_pending()
        (folder / f"told-{watcher.record.rank}").touch()
        _wait_for_others(folder)
    finally:
        os._exit(1)


def _wait_for_others(folder: Path) -> None:
    """Wait until all ranks have written their records, for a while: the launcher ends them when one has gone."""
    until_s = time.monotonic() + TOGETHER_S
    while len(list(folder.glob("told-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until_s:
        time.sleep(LOOK_S)


def install(watcher: Watcher) -> None:
    """Hook the modules of HOOKS that are imported, and the others when they are."""
    for name, hook in HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name], watcher)
    sys.meta_path.insert(0, _AfterImport(watcher))


class _AfterImport(MetaPathFinder):
    """Calls the hooks of a module after its import."""

    def __init__(self, watcher: Watcher):
        self._watcher = watcher

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in HOOKS else None
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader, HOOKS[name])
        return spec

    def _extend(self, loader: Loader, hook: Callable[[ModuleType, Watcher], None]) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module, self._watcher)

        loader.exec_module = exec_module  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
