"""A run as Prometheus metrics: what is measured, the values that events add up to, and the endpoint
that serves them."""
