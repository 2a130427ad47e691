"""What checks the source; no part of the package that is installed."""
