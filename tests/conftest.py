"""Shared by all tests: one thread per rank, and no leftover of one test in the next."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `ranks` and other helpers beside the tests

torch.set_num_threads(1)
# A shell that starts the tests in the background ignores Ctrl-C for them, and every command they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
