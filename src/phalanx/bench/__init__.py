"""Measures this machine: products, kernels, collectives and storage, and fits what plans need."""
