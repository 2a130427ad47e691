"""Data parallelism: DDP, FSDP and ZeRO-1, and how their gradients are compressed."""
