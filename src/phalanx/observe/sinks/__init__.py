"""One file per sink; each offers `open_sink(run_dir) -> Sink` and says what it `REQUIRES` and may `PRELOAD`."""
