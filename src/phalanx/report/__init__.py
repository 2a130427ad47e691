"""A run as one self-contained page. Torch-free."""
