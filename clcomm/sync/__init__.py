"""How a model's gradients are averaged: buckets, overlap, agreement between ranks."""
