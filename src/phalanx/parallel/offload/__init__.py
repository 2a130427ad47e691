"""Offload to host memory: activations between forward and backward, or optimizer state."""
