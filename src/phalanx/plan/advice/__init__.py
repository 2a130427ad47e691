"""A plan's advice: rules of thumb with its numbers, decision tables of the field, and where
the time and the memory of a step go."""
