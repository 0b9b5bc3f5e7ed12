"""The sub-commands of `clcomm`, one a file, each a `Command` named COMMAND; clcomm/tools/cli.py lists them."""
