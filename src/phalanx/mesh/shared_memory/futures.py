"""Futures of operations that other ranks have not come to yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from phalanx.mesh.shared_memory.channel import GroupChannel
from phalanx.mesh.shared_memory.operations import Operation


class OperationFuture(torch.futures.Future[Any]):
    """What `take_result` gives once `operation` is done.

    `wait_for_end` moves data for those who wait in Python; a thread does for those who wait in C++.
    """

    def __init__(
        self,
        operation: Operation,
        wait_for_end: Callable[[], object],
        take_result: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.operation = operation
        # Whoever takes it out sets the future: the thread, or one that waits.
        self._unset = [(wait_for_end, take_result)]

    def wait(self) -> Any:
        for wait_for_end, _ in self._unset[:]:
            try:
                wait_for_end()
            except Exception as error:
                self.set_error(error)
            else:
                self.set_from_operation()
        return super().wait()

    def set_from_operation(self) -> None:
        """Set it, unless it is: the operation is done."""
        for take_result in self._take_unset():
            self.set_result(take_result())

    def set_error(self, error: Exception) -> None:
        """Have those who wait raise `error`, unless it is set."""
        for _ in self._take_unset():
            self.set_exception(error)  # type: ignore[arg-type]

    def _take_unset(self) -> list[Callable[[], Any]]:
        try:
            return [self._unset.pop()[1]]
        except IndexError:
            return []


class PendingFutures:
    """Futures of operations that are open. `settle` and `sleep` are called by one thread, which
    runs what callers have put behind a future."""

    def __init__(self) -> None:
        self._pending: deque[tuple[OperationFuture, GroupChannel, float]] = deque()

    def add(self, future: OperationFuture, channel: GroupChannel, timeout_s: float) -> None:
        self._pending.append((future, channel, time.monotonic() + timeout_s))

    def settle(self) -> bool:
        """Set the futures whose operations have ended, or never will; True if others are left."""
        now_s = time.monotonic()
        for _ in range(len(self._pending)):
            future, channel, deadline_s = self._pending.popleft()
            operation = future.operation
            error = None if operation.is_done else channel.find_error(operation)
            if operation.is_done:
                future.set_from_operation()
            elif error is not None:
                future.set_error(error)
            elif now_s >= deadline_s:
                future.set_error(RuntimeError(f"Timed out waiting for {channel.say(operation)}"))
            else:
                self._pending.append((future, channel, deadline_s))
        return bool(self._pending)

    def sleep(self, timeout_s: float) -> bool:
        """Return when the oldest operation may come on, at the latest after `timeout_s`. False, and
        at once, where no future is open."""
        if not self._pending:
            return False
        future, channel, _ = self._pending[0]
        return channel.sleep_on(future.operation, timeout_s)
