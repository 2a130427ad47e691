"""The opened process groups of a layout, logical shards, and what differs between torch releases.

First torch.
"""
