"""Whose a run and its store are: the lock, the fencing token and the owner of an object store."""
