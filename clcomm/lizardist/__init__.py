"""LizarDist's modules under their own names: a script has only to import `clcomm.lizardist` instead of `lizardist`.

Signatures, defaults and counts are LizarDist's; transports and bucketing are clcomm's.
"""
