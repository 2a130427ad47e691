"""One file per axis or transform, applied in one fixed order. Never imports models."""
