"""From text or token ids to batches: a global sequence whose order is a pure function of (seed,
index)."""
