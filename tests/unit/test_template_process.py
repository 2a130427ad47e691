"""The process that forks servers: how long its answer is waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from phalanx.launch import server_process
from phalanx.launch.messages import SUPERVISOR_TO_TEMPLATE_CODEC, TEMPLATE_TO_SUPERVISOR_CODEC
from phalanx.launch.server_process import TemplateProcess
from phalanx.launch.wire import MessageChannel

# Its answer takes a little of the processor that it must share.
# It gets a seventieth of what another program leaves it: too little while that one is there, and
# enough where tests beside it want the processor, too. (SCHED_IDLE would get a three-hundredth.)
ANSWERS_AFTER_WORK = """
import os, socket, sys, time
from phalanx.launch.messages import (
    SUPERVISOR_TO_TEMPLATE_CODEC, TEMPLATE_TO_SUPERVISOR_CODEC, ServerForked
)
from phalanx.launch.wire import MessageChannel
link = MessageChannel(
    socket.socket(fileno=int(sys.argv[1])),
    TEMPLATE_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_TEMPLATE_CODEC,
)
os.sched_setaffinity(0, {int(sys.argv[2])})
os.nice(19)
print(flush=True)
while not link.receive():
    pass
began_s = time.process_time()
while time.process_time() < began_s + 0.06:
    pass
link.send(ServerForked(os.getpid()))
link.receive()
"""
SPINS = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""


def start(script: str, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    """A process of `script` that has come to where it waits, or spins."""
    command = [sys.executable, "-c", script, *arguments]
    process: subprocess.Popen[bytes] = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of waits for a processor")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_template_without_a_processor_is_waited_for_and_one_that_is_stopped_is_not(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    # As long as whoever waits may lack a processor, too: it looks at the template's lack between
    # its own turns.
    monkeypatch.setattr(server_process, "_TEMPLATE_ANSWER_TIMEOUT_S", 1.5)
    processor = str(min(os.sched_getaffinity(0)))
    ours, its = socket.socketpair()
    life_read, life_write = os.pipe()
    presence_read, presence_write = os.pipe()
    answering = start(ANSWERS_AFTER_WORK, str(its.fileno()), processor, pass_fds=(its.fileno(),))
    its.close()
    os.close(presence_write)
    spinning = start(SPINS, processor)
    link = MessageChannel(ours, SUPERVISOR_TO_TEMPLATE_CODEC, TEMPLATE_TO_SUPERVISOR_CODEC)
    template = TemplateProcess(answering, link, life_write, presence_read)
    if is_stopped:
        answering.send_signal(signal.SIGSTOP)
    # Another program has the processor for twice as long as an answer may take.
    timer = threading.Timer(3.0, spinning.kill)
    timer.start()
    server = template.fork_server()
    timer.cancel()
    spinning.kill()
    spinning.communicate()
    assert (server is None) == is_stopped
    if server is not None:
        server.kill()
    template.kill()
    answering.communicate()
    os.close(life_read)
