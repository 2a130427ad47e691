"""What bounds a run: from the events of its ranks to one sentence with its evidence and the gain
that mending it would give."""
