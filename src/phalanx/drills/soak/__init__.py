"""A soak: one long run that many faults strike, one after the other, beside one undisturbed run."""
