"""`clcomm doctor`: what is wrong with an installation, a host or a job's ranks, and what to do about it.

A topic is a file with `probe`, which looks at this process's host, and `check`, which judges what all ranks found. A
probe returns JSON-compatible facts, so `check` needs nothing of the rank that found them. Everything is imported where
it is needed: the doctor runs where MPI, OpenCL or both are broken.
"""
