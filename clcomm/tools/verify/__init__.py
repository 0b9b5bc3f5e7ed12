"""`clcomm verify`: watch a script's ranks for some steps, and judge whether they train as one process would.

Each rank records (`watcher.py`, with `torch_hooks.py` and `engine_hooks.py`), the command judges (`judge.py`).
"""
