"""LizarDist's modules under their own names: in a script's imports `lizardist` becomes `clcomm.lizardist`.

Calls, defaults and counts are LizarDist's; transports and bucketing are clcomm's.
"""
