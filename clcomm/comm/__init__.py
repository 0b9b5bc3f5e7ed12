"""Communication: arrays move between ranks, every call is compared, counted and watched.

communicator.py is the face: collectives check a call and run it, transport moves the bytes, stats count them, tensors
bring PyTorch's, costs predict the time. watch knows the job's processes: who stalls, who has died, how a rank ends.
Start with communicator.py, then transport/base.py; a death is noticed in watch/exit_monitor.py.
"""
