"""LizarDist's modules under their own names: in a script's imports `lizardist` becomes `clcomm.lizardist`.

The calls, their defaults and what they count are LizarDist's; the transports, and what is done with buckets, are ours.
"""
