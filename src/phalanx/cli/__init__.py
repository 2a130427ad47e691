"""One file per verb; composes everything. The first line of a verb's module is its help."""
