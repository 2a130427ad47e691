"""Reading checkpoints: load, verify, list, compare, and weights for a plain module."""
