"""One file per sink; each offers `open_sink(run_dir) -> Sink` and the package it `REQUIRES`."""
