"""Base: this process, its files and terminal, errors and units, and arithmetic on offsets; nothing of ours below it.

host knows the process and its machine, storage writes and locks files, console prints and parses options, flat_space
lays a model's parameters out in one array and cuts it into buckets, schedules list who sends what when.
Start with errors.py, then flat_space/layout.py.
"""
