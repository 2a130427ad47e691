"""Weights from and to the formats of others.

Torch-free but for what a separate process unpickles.
"""
