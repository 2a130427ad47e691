"""Makes the parts of a trace that ranks have written one file, which Perfetto shows."""
