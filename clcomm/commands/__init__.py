"""The sub-commands of `clcomm`, one a file, each a `Command` named COMMAND; clcomm/cli.py lists them."""
