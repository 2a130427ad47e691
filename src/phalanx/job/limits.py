"""The largest numbers that a job may ask for."""

MAX_LAYERS = 4096
"""Blocks of a model: a plan looks at each."""
MAX_MODEL_SIZE = 10**8
"""A width, a vocabulary, a length of a model: the product of two still counts bytes in 64 bits."""
