"""The protocols between ranks under every interleaving: the real code's steps, one shared word or call at a time."""
