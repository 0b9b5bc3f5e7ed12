"""Programs of one idea each, in under 80 lines: `mpiexec -n 2 python -m examples.one_idea.hello`."""
