"""One torch-free supervisor: starts ranks from a warm server process, watches, restarts, stops
them."""
