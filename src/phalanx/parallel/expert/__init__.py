"""Expert parallelism: each rank holds a part of the experts."""
