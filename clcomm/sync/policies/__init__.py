"""Policies of training that talks rarely: ranks take steps of their own, and exchange parameters now and then."""
