"""Facts about a run: events, the bus that carries them, the sinks that format them. Torch-free."""
