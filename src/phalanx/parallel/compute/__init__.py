"""How blocks compute: torch.compile and fp8 products."""
