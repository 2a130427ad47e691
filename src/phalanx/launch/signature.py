"""What stays equal when the same failure happens again: its words without ports, addresses,
process ids and times."""

from __future__ import annotations

import re
import socket

# In this order: what is found first is not looked at again. Plain numbers stay: index 3 is another
# error than index 7.
_VARYING_TEXT_REPLACEMENTS = (
    (re.compile(r"\b0x[0-9a-fA-F]+"), "0x"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "UUID"),
    # glog's head of a line: [E1122 16:49:41.123456 4711 ProcessGroupNCCL.cpp:1]
    (re.compile(r"\b[IWEF]\d{4} \d\d:\d\d:\d\d(?:\.\d+)?\s+\d+"), "TIME PID"),
    (
        re.compile(
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
        ),
        "TIME",
    ),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"), "TIME"),
    # IPv6 in brackets or bare, then IPv4; each with the port that follows it in the words of gloo,
    # c10d or Python
    (
        re.compile(r"(?<!\w)\[[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:.]*(?:%\w+)?\](?::\d{1,5}\b)?"),
        "ADDRESS",
    ),
    (
        re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){3,7}(?::?[0-9a-fA-F]{1,4})(?![\w:])"),
        "ADDRESS",
    ),
    (
        re.compile(
            r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*)?::(?:[0-9a-fA-F]{1,4}:)*[0-9a-fA-F]{1,4}(?![\w:])"
        ),
        "ADDRESS",
    ),
    (re.compile(r"\[?\b(?:\d{1,3}\.){3}\d{1,3}\b\]?(?:(?::|', |, |\|)\d{1,5}\b)?"), "ADDRESS"),
    (re.compile(r"\[([\w.-]+)\]:\d{1,5}\b"), r"[\1]:N"),
    (
        re.compile(
            r"\b(?![\w.-]+\.(?:py|cc|cpp|cu|cuh|h|c|toml|json)\b)(localhost|[\w-]+(?:\.[\w-]+)+):\d{2,5}\b(?!:)"
        ),
        r"\1:N",
    ),
    (
        re.compile(
            r"\b(ports?|pids?(?:\(s\))?|process|thread(?: id)?|tid|fd)(\s*[=:#]?\s*)\d+(?:, \d+)*",
            re.IGNORECASE,
        ),
        r"\1\2N",
    ),
    (
        re.compile(
            r"\b\d+(?:\.\d+)?(?:e-?\d+)?\s*(?:ns|us|µs|ms|s|secs?|seconds?|milliseconds?|min|minutes?|h)\b"
        ),
        "TIME",
    ),
    (re.compile(r"\b(SeqNum|seq|sequence number|work)(\s*[=:]\s*)\d+", re.IGNORECASE), r"\1\2N"),
    (re.compile(r"\b(attempt[-_ =]?)\d+", re.IGNORECASE), r"\1N"),
    # The store's keys of one attempt.
    (re.compile(r"\b(phalanx/)\d+(/)"), r"\1N\2"),
    (re.compile(r"(/tmp[\w.-]*|/tmp/[\w.-]*?)(?:tmp|torch)\w+"), r"\1TMP"),
    # Seconds since 1970, thread ids.
    (re.compile(r"\b\d{9,}(?:\.\d+)?\b"), "N"),
)


def remove_varying_text_from_failure(words: str) -> str:
    """`words` with what differs from start to start replaced; equal for two failures that say
    the same."""
    host = socket.gethostname()
    # A name of a letter or two would be found in ordinary words.
    if len(host) > 2:
        words = re.sub(rf"(?<![\w.-]){re.escape(host)}(?:\.[\w.-]*\w)?(?![\w-])", "HOST", words)
    for pattern, instead in _VARYING_TEXT_REPLACEMENTS:
        words = pattern.sub(instead, words)
    return " ".join(words.split())
