"""Checks of a job that one key alone cannot answer: one file per subject. Torch-free."""
