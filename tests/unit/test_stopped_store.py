"""A store whose process is stopped is told from one that is stopped for a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from phalanx.launch.stopped_store import MIN_STOPPED_S, StoppedStoreWatch


def test_a_store_that_stays_stopped_is_found() -> None:
    """The seconds of the watch are made up."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        watch, now_s = StoppedStoreWatch(process.pid), 100.0

        def is_found_within(seconds: float) -> bool:
            nonlocal now_s
            until_s = now_s + seconds
            while now_s < until_s:
                now_s += 0.5
                if watch.is_stopped(now_s):
                    return True
            return False

        assert not is_found_within(3 * MIN_STOPPED_S)
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert not is_found_within(MIN_STOPPED_S - 1.0)
            process.send_signal(signal.SIGCONT)
            os.waitpid(process.pid, os.WCONTINUED)
            assert not is_found_within(1.0)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_found_within(MIN_STOPPED_S + 1.0)
        assert not StoppedStoreWatch(0).is_stopped(now_s)
    finally:
        process.kill()
        process.communicate()
