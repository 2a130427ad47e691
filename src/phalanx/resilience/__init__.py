"""Faults to inject and guards that decide about a step."""
