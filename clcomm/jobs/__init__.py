"""Jobs: ranks are started, supervised and started again, and their state is kept.

launch is `clcomm run` (one supervisor, with --min-ranks one that keeps worlds going), top shows a running job, and
checkpoint writes state to files and to other hosts' memory. Start with launch/supervisor.py.
"""
