"""netcl's names over this package's engine: a program has only to import `clcomm.netcl` instead of `netcl`.

That is for its documented data-parallel training on several devices of a process (docs/several-devices.md); with
netcl's own kernels, and ranks, see `clcomm.adapters.netcl`.
"""

import os

if os.environ.get("NETCL_DEVICE"):  # netcl's name of the variable
    os.environ.setdefault("CLCOMM_DEVICE", os.environ["NETCL_DEVICE"])
