"""What a campaign counted or drew, where whoever runs `make test` sees it: pytest captures what
a test prints."""

from __future__ import annotations

import pytest


def show(capsys: pytest.CaptureFixture[str], line: str) -> None:
    """A line of its own between pytest's dots."""
    with capsys.disabled():
        print(f"\n{line}", end=" ", flush=True)
