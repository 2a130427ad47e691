"""What one process computes with a job's own module and loss, and whether that loss mixes the
rows of a batch."""
