"""Tensor parallelism: matrices are cut between ranks that work on the same tokens."""
