"""The sections of a plan's page: each file turns facts into the HTML of a section or two."""
