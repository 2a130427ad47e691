"""One folder per axis or concern, transforms in one fixed order. Never imports models."""
