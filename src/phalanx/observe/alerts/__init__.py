"""Alerts: what of a run a person should hear of at once, and how it is sent."""
