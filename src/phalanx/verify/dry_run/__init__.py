"""The dry run: the real program of a job with fake tensors and a fake process group, one rank of
each kind."""
