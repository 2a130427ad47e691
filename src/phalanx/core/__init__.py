"""The ground floor: errors, units, registry, files, digests and phases. Standard library only."""
