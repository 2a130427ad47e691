"""The step loop and the state it advances."""
