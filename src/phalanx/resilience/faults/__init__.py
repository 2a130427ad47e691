"""One file per fault; each offers `inject()`. The folder is the registry."""
