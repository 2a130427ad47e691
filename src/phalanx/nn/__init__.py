"""Models, the seams they expose to parallelism, and objectives. Models never import parallelism."""
