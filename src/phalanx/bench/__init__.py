"""Measurements of this machine and of phalanx beside others."""
