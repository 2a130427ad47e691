"""Trains one model in several libraries in turn, beside ranks that never talk: who is how fast."""
