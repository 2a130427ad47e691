"""A trained checkpoint put to use: evaluated, or asked to continue texts."""
