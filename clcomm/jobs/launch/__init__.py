"""`clcomm run -n 4 train.py`: the MPI's launcher, and each rank's set-up before the script.

Nothing is imported here: a rank sets the number of its threads before anything loads NumPy.
"""
