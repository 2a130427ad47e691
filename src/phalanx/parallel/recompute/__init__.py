"""Activation checkpointing: blocks compute parts of the forward again in the backward."""
