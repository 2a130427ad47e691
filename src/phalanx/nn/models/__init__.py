"""One file per built-in model; each offers `build(shape, ...)`. The folder is the registry."""
