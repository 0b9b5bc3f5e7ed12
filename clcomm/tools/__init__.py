"""Tools: the command `clcomm`, a file for each of its sub-commands, and the two that are long: doctor and verify.

Start with commands/listing.py. A sub-command parses its options and calls the wing that does the work.
"""
