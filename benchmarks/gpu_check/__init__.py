"""`make gpu-check`: phalanx on one GPU beside other trainers, and its CUDA kernels beside
references.

The parent process (`__main__`, `run`, `children`, `table`, `carried`, `gpu`, `cases`) needs nothing
but Python. Each system is a file of `systems/` and runs in a process of its own.
"""
