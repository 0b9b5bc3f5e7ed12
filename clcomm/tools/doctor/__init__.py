"""`clcomm doctor`: diagnosis of an installation, a host or a job's ranks, with remedies.

Each topic has a `probe`, which collects facts on this process's host, and a `check`, which judges all ranks' facts.
Facts are JSON-compatible, so `check` needs nothing of the rank that found them. Everything is imported where it is
needed: the doctor runs where MPI, OpenCL or both are broken.
"""
