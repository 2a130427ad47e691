"""Faults put into real runs, and what the runs made of them, beside the bars they must meet."""
