"""Predictions against measured runs: rows of published results, read, predicted and scored."""
