"""BatchNorm over the microbatch of all data-parallel ranks."""
