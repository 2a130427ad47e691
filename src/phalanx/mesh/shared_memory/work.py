"""The handle of an operation that torch and its callers wait for."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.mesh.shared_memory.futures import OperationFuture
from phalanx.mesh.shared_memory.messages import Receive
from phalanx.mesh.shared_memory.operations import Collective, Operation


class SharedMemoryWork(dist.Work):
    """A `torch.distributed.Work` of an operation through shared memory.

    `wait_for_end(timeout_s)` returns when it is done; None stands for the group's timeout.
    `find_error` gives what has ended the group's operations. `keep_future` has a future set when it
    is done. `result` is what the call gives, for
    futures; None where its caller waits and asks for nothing.
    """

    def __init__(
        self,
        operation: Operation,
        try_advance: Callable[[], object],
        wait_for_end: Callable[[float | None], None],
        find_error: Callable[[], Exception | None],
        keep_future: Callable[[OperationFuture], None],
        result: Any,
    ) -> None:
        super().__init__()
        self.operation = operation
        self._try_advance, self._wait_for_end = try_advance, wait_for_end
        self._find_error, self._keep_future, self._result = find_error, keep_future, result
        self.was_waited_for = False

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        timeout_s = None
        if timeout is not None and timeout.total_seconds() > 0:
            timeout_s = timeout.total_seconds()
        if not self.operation.is_done:
            self._wait_for_end(timeout_s)
        self.was_waited_for = True
        return True

    def forget_result(self) -> None:
        """Let the tensors go: nobody asks for them any more."""
        self._result = None

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True if it is done, or will never be."""
        if not self.operation.is_done:
            self._try_advance()
        return self.operation.is_done or self._find_error() is not None

    def is_success(self) -> bool:
        return self.operation.is_done

    def exception(self) -> BaseException | None:
        return None if self.operation.is_done else self._find_error()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is set when the operation has ended; this does not wait. Raises
        NotImplementedError for sends and receives, as gloo does."""
        if not isinstance(self.operation, Collective):
            raise NotImplementedError("sends and receives have no future")
        future = OperationFuture(self.operation, self.wait, self._take_result)
        error = self._find_error()
        if self.operation.is_done:
            future.set_from_operation()
        elif error is not None:
            future.set_error(error)
        else:
            self._keep_future(future)
        return future

    def _take_result(self) -> Any:
        self.was_waited_for = True
        return self._result

    def _source_rank(self) -> int:
        operation = self.operation
        if isinstance(operation, Receive) and operation.source is not None:
            return operation.source
        return -1

    source_rank = _source_rank
