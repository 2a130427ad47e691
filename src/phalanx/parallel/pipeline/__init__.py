"""Pipeline parallelism: blocks are cut into stages, and microbatches pass through them."""
