"""A run as one self-contained page, finished or not, and as metrics. Torch-free."""
