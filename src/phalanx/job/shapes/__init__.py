"""The shapes of models, one file per kind: each counts its own parameters, FLOPs and activations.
Torch-free."""
