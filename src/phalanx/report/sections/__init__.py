"""The sections of a run's page: each file turns facts into the HTML of a section or two.

What reduces events to facts stays one folder up.
"""
