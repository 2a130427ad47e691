"""The page of a run while it trains: made anew where files grew, and served to this machine
alone."""
