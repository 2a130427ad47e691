"""Logical tensors on disk: manifest, store and locks. Never sees a model or a trainer."""
