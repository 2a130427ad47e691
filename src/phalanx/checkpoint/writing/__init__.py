"""Writing checkpoints: the collective write, the thread beside training, pruning of old ones."""
