"""`python -m clcomm` is the `clcomm` command."""

from clcomm.tools.cli import entry

if __name__ == "__main__":
    entry()
