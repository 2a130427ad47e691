"""Tokens/s, memory and first step of phalanx beside a bare DDP loop."""
