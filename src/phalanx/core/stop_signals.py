"""The signal by which the supervisor asks ranks to leave, and not a person or a scheduler."""

from __future__ import annotations

import signal

# Ranks save and leave, as on SIGTERM, and then start again with more of them. Where there are no
# real-time signals it is SIGTERM itself.
LEAVE_FOR_MORE_RANKS_SIGNAL = int(
    signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else signal.SIGTERM
)
# The `reason` of `stop_requested` then.
MORE_RANKS_REASON = "more_ranks"
