"""One optimizer per file: `build(groups, optim)`. The folder is the registry of optim.kind."""
