"""Logical tensors on disk: manifest, files, stores; writing, reading, and who owns a run.

Never sees a model or a trainer.
"""
