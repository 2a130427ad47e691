"""The largest numbers that a job may ask for."""

MAX_LAYERS = 4096
"""Blocks of a model: a plan looks at each."""
