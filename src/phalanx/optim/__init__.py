"""Optimizers and learning-rate schedules as functions of the step."""
