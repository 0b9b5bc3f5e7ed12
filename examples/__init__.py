"""Programs to run: `python -m examples.loop`, `examples.mnist` and `examples.compare_bucketing`.

What is set here serves a quick start, and has to be set before a program imports anything else.
"""

import gc

from clcomm.jobs.launch.variables import share_cores

share_cores()
gc.set_threshold(10_000, 50)  # imports make 100,000 objects, and no garbage; with 700 a tenth of their time is a search
