"""Observes a run from outside its ranks: reads what they leave in the run directory, serves it as
metrics, and sends alerts."""
