"""Synchronisation: rank 0's parameters go to every rank, and gradients are averaged in buckets, during backward.

synchronizer.py is the face, adapters read each library's models, bucket_plan.py reduces, zero divides updates and
parameters between ranks, compression and policies send less, elastic.py goes on with the ranks that are left.
Start with synchronizer.py, then model_sync.py.
"""
