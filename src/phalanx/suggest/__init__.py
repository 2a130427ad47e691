"""Proposes sharding rules for a module by looking at what it computes."""
