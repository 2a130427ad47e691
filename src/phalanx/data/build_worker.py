"""A worker of a build: `python -m phalanx.data.build_worker`, tasks in, outcomes out, one line
of JSON each."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.core.terminal import filter_standard_streams, unwrap_stream
from phalanx.data.build_pool import encode_error_message
from phalanx.data.encode import EncodingCounts, build_shard
from phalanx.data.spans import ShardTask
from phalanx.data.tokenizer import load_tokenizer


def main() -> None:
    filter_standard_streams()  # standard error is the terminal's
    # Ctrl-C reaches the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_queue_lines_then_exit, args=(messages,), daemon=True).start()
    hello = messages.get()
    out = Path(hello["out"])
    try:
        tokenizer = load_tokenizer(hello["tokenizer"])
        while True:
            task = ShardTask.from_json(messages.get()["task"])
            outcome = build_shard(task, out, tokenizer, hello["column"], _send_encoding_counts)
            _send_message({"done": outcome.to_json()})
    except (PhalanxError, OSError) as error:
        _send_message(encode_error_message(error, out))
        threading.Event().wait()  # the parent has read it when it ends us


def _queue_lines_then_exit(messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass lines on; at their end the parent is gone, and whatever is being built is nobody's."""
    for line in sys.stdin.buffer:
        messages.put(json.loads(line))
    os._exit(0)


def _send_encoding_counts(counts: EncodingCounts) -> None:
    _send_message({"running": vars(counts)})


def _send_message(message: dict[str, Any]) -> None:
    stream = unwrap_stream(sys.stdout)  # the parent's pipe
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
