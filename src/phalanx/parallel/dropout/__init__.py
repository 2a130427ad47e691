"""Dropout whose masks do not depend on the layout."""
