"""`phalanx` without the time that imports take: commands and ranks are forked from processes that
have imported.

`python warm.py ARGUMENTS` is `phalanx ARGUMENTS`, but for one thing: `python -m MODULE` for a
module of MODULES is not a new interpreter, it is a fork of the nursery of ranks, which the tests
start once; so it is in the tests' own process (`conftest.py`). The process itself, its descriptors,
environment, folder and session are those that it asked for. Importing torch is most of a short run.
`fork_command` takes the command itself from a second nursery, which has imported the command line
and no torch, or from that of ranks where the command is a rank of another launcher's: so are the
ranks that torchrun starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

NURSERY, HOME = "PHALANX_TESTS_NURSERY", "PHALANX_TESTS_HOME"
MODULES = (
    "phalanx.nn.probe",
    "phalanx.run.one_process.rows_probe",
    "phalanx.launch.template",
    "phalanx.checkpoint.exchange.unpickle",
    "phalanx.bench.training.server",
    (TORCHRUN := "torch.distributed.run"),
)
VERBS = ("train", "plan", "verify", "report", "checkpoint", "data", "eval", "generate", "init")
# What each nursery imports: of ranks what MODULES import, but not they themselves, for each runs as
# `__main__`.
IMPORTED = {
    "ranks": (
        "torch",
        "torch._dynamo",
        "phalanx.run.rank",
        "phalanx.verify.rank",
        "phalanx.nn.hugging_face.adapter",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
        "runpy",
    ),
    "commands": (
        *(
            "phalanx.run.training",
            "phalanx.run.supervised",
            "phalanx.observe.sinks.tensorboard",
            "runpy",
        ),
        *(f"phalanx.cli.{verb}" for verb in VERBS),
    ),
}
# In place of a module: `phalanx` itself, or a script. Both end as an interpreter ends.
COMMAND, SCRIPT = ":command", ":script"
# Variables that are read when an interpreter or a library starts: with others than the nursery's
# there is no fork.
AT_START = (
    *("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "ATEN_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH", "LD_", "MALLOC_", "GLIBC_", "CUDA_", "GOMP_", "CXX"),
    *(
        "LC_",
        "LANG",
        "TERMINAL_WIDTH",
        "FORCE_COLOR",
        "NO_COLOR",
        "PY_COLORS",
        "GITHUB_ACTIONS",
        "FSSPEC_",
        "XDG_",
    ),
)
NOT_AT_START = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    "TORCHINDUCTOR_CACHE_DIR",  # which torch sets where anything was compiled
    "XDG_CACHE_HOME",  # where phalanx looks when it opens its cache, not when it is imported
    *("TORCHELASTIC_", "TORCH_NCCL_"),  # of torchrun, read where groups are opened
    *(
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),  # read where CUDA starts
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MAX_BYTES, MAX_FDS, FAR = 1 << 18, 16, 200


def source_of_phalanx() -> Path:
    """The folder of the phalanx that this process imports."""
    found = importlib.util.find_spec("phalanx")
    assert found is not None
    return Path(str(found.origin)).parent


def _home() -> str:
    return str(source_of_phalanx())


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: env[name]
        for name in sorted(env)
        if name.startswith(AT_START) and not name.startswith(NOT_AT_START)
    }


# The nursery: it forks what it is asked for and tells how that ended.


def serve(path: str, kind: str, life: int) -> None:
    """Fork what the connections to the socket at `path` ask for, until the other end of `life`
    closes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    gc.disable()
    for name in IMPORTED[kind]:
        if name.startswith("transformers.") and importlib.util.find_spec("transformers") is None:
            continue
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each fork looks through all that was imported, and copies its pages
    gc.enable()
    wakeup, wakeup_write = os.pipe()
    for fd in (wakeup, wakeup_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    print(os.getpid(), flush=True)
    waiting: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([listener, wakeup, life], [], [])
        if life in readable:
            return
        if wakeup in readable:
            os.read(wakeup, 4096)
        while waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            with contextlib.suppress(OSError), waiting.pop(pid) as asked:
                asked.send(str(os.waitstatus_to_exitcode(status)).encode())
        if listener in readable:
            asked, _ = listener.accept()
            message, fds, _, _ = socket.recv_fds(asked, MAX_BYTES, MAX_FDS)
            wanted = json.loads(message)
            pid = os.fork()  # the nursery has one thread
            if pid == 0:
                for inherited in (listener, asked, *waiting.values()):
                    inherited.detach()
                _become(wanted, fds)
                if wanted["module"] == COMMAND:
                    _run_command(wanted["arguments"])
                if wanted["module"] == SCRIPT:
                    _run_script(wanted["arguments"])
                if wanted["module"] == TORCHRUN:
                    _start_ranks_of_torchrun_from_nursery()
                _run_module(wanted["module"], wanted["arguments"])
            for fd in fds:
                os.close(fd)
            if wanted["process_group"] is not None:
                with contextlib.suppress(OSError):  # it has done so itself, and may be gone
                    os.setpgid(pid, wanted["process_group"])
            waiting[pid] = asked
            asked.send(str(pid).encode())


def _become(wanted: dict[str, Any], fds: list[int]) -> None:
    """What a new interpreter would be: these descriptors and no others, this environment, folder
    and search path."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if wanted["new_session"]:
        os.setsid()
    if wanted["process_group"] is not None:
        os.setpgid(0, wanted["process_group"])
    far = [fcntl.fcntl(fd, fcntl.F_DUPFD, FAR) for fd in fds]
    os.closerange(0, FAR)
    for fd, number in zip(far, wanted["numbers"], strict=True):
        os.dup2(fd, number)
    os.closerange(max(2, *wanted["numbers"]) + 1, 4096)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    tempfile.tempdir = None
    sys.stdin, sys.stdout, sys.stderr = (
        open(0),
        open(1, "w"),
        open(2, "w", errors="backslashreplace"),
    )
    searched = [path for path in wanted["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*wanted["here"], *searched, *(path for path in sys.path if path not in searched)]
    importlib.invalidate_caches()


def _run_module(module: str, arguments: list[str]) -> NoReturn:
    """`python -m MODULE ARGUMENTS`, without what an interpreter does at its end."""
    code = 1
    try:
        sys.argv = [module, *arguments]
        code = 0
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_command(arguments: list[str]) -> NoReturn:
    """`phalanx ARGUMENTS`, ranks of the other nursery.

    Ends by SystemExit, as the command itself does.
    """
    from phalanx.__main__ import main

    sys.argv = ["phalanx", *arguments]
    if NURSERY in os.environ:
        subprocess.Popen = popen  # type: ignore[assignment, misc]
    main()
    sys.exit(0)


def _run_script(arguments: list[str]) -> NoReturn:
    """`python ARGUMENTS`, whose first is a script. Ends by SystemExit, as the script itself does."""
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    subprocess.Popen = popen  # type: ignore[assignment, misc]
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit(0)


def _start_ranks_of_torchrun_from_nursery() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
        words = list(args)
        is_forked = words[:2] == [sys.executable, "-u"] and at_start(ONE_THREAD | env) == _AT_START
        # A benchmark chooses the environment of what it measures, and no nursery is in it.
        if not is_forked or NURSERY not in env:
            return _Popen(args, env=env, **options)
        is_phalanx = words[2:4] == ["-m", "phalanx"]
        kind, arguments = (COMMAND, words[4:]) if is_phalanx else (SCRIPT, words[2:])
        here = [os.getcwd()] if is_phalanx else []
        return _fork(env[NURSERY], kind, arguments, dict(env), here, options)

    subprocess_handler.Popen = start  # type: ignore[attr-defined]


class Nursery:
    """The process that forks ranks or commands, no child of ours.

    Its import takes seconds; it ends with the tests.
    """

    def __init__(self, kind: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-tests-")
        self.path = str(Path(self._folder.name) / "nursery")
        life_read, self._life = os.pipe()
        with subprocess.Popen(
            [sys.executable, "-P", __file__, "--nursery", self.path, kind, str(life_read)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Without the last, transformers would have torch start CUDA, which no fork can use then.
            env=ONE_THREAD | os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            pass_fds=(life_read,),
            start_new_session=True,
            text=True,
        ) as process:
            os.close(life_read)
            assert process.stdout is not None
            self.pid = int(process.stdout.readline())

    def variables(self) -> dict[str, str]:
        """What a command's environment needs to find it."""
        return {NURSERY: self.path, HOME: _home()}

    def end(self) -> None:
        os.close(self._life)
        self._folder.cleanup()


# A command: what it starts comes from the nursery, if it is one of MODULES.


class Forked:
    """What `subprocess.Popen` is to its user, of a process that the nursery forked."""

    def __init__(
        self, connection: socket.socket, pid: int, stdout: int | None, stderr: int | None
    ) -> None:
        self._connection, self.pid, self.returncode = connection, pid, None
        self.args: Sequence[str] = ()
        self.stdin = None
        self.stdout: IO[str] | None = None if stdout is None else open(stdout, errors="replace")
        self.stderr: IO[str] | None = None if stderr is None else open(stderr, errors="replace")

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._connection:
                self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
        return self.returncode

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *problem: object) -> None:
        self.wait()

    def communicate(
        self, input: None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        until = None if timeout is None else time.monotonic() + timeout
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        self._read: dict[IO[str], bytes] = getattr(self, "_read", dict.fromkeys(streams, b""))
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                if not stream.closed:
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if until is None else max(0.0, until - time.monotonic())
                ready = selector.select(left)
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                for key, _ in ready:
                    stream: Any = key.fileobj
                    piece = os.read(key.fd, 1 << 16)
                    self._read[stream] += piece
                    if not piece:
                        selector.unregister(stream)
                        stream.close()
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        out, err = (None if s is None else self._text_of(s) for s in (self.stdout, self.stderr))
        return out, err

    def _text_of(self, stream: IO[str]) -> str:
        return self._read[stream].decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def popen(command: Any, **options: Any) -> Any:
    """`subprocess.Popen`, or a fork of the nursery for `python [-P] -m MODULE ...`."""
    return fork_module(lambda: os.environ, command, options) or _Popen(command, **options)


def fork_module(
    find_variables: Callable[[], Mapping[str, str]], command: Any, options: dict[str, Any]
) -> Forked | None:
    """The process that `command` asks for, as a fork of the nursery of ranks that the variables
    name; None if that is another process than a new interpreter would be."""
    words = list(command) if isinstance(command, list | tuple) else []
    is_safe = words[1:2] == ["-P"]
    module, arguments = (words[2 + is_safe :] or [""])[0], words[3 + is_safe :]
    env = dict(options.get("env") or os.environ)
    if (
        words[:1] != [sys.executable]
        or words[1 + is_safe : 2 + is_safe] != ["-m"]
        or module not in MODULES
        or at_start(ONE_THREAD | env) != _AT_START
    ):
        return None
    variables = find_variables()
    if variables[HOME] != _home():
        return None
    here = [] if is_safe else [str(options.get("cwd") or os.getcwd())]
    return _fork(variables[NURSERY], module, arguments, env, here, options)


def fork_phalanx(
    find_nursery: Callable[[], Nursery], command: Any, options: dict[str, Any]
) -> Forked | None:
    """The process of `python warm.py ARGUMENTS`, as a fork of the nursery of commands; None if
    `command` is another one, or needs an interpreter of its own."""
    words = list(command) if isinstance(command, list | tuple) else []
    env = dict(options.get("env") or os.environ)
    if words[:2] != [sys.executable, __file__] or at_start(ONE_THREAD | env) != _AT_START:
        return None
    if "preexec_fn" in options or options.get("stdin") == subprocess.PIPE:
        return None
    here = [str(options.get("cwd") or os.getcwd())]
    return _fork(find_nursery().path, COMMAND, words[2:], env, here, options)


def fork_command(
    nursery: Nursery, arguments: Sequence[str], env: Mapping[str, str], **options: Any
) -> Any:
    """`phalanx ARGUMENTS`: a fork of the nursery, or a new interpreter where `env` has what it
    reads."""
    if at_start(ONE_THREAD | env) != _AT_START or "preexec_fn" in options:
        return _Popen([sys.executable, __file__, *arguments], env=env, text=True, **options)
    return _fork(
        nursery.path,
        COMMAND,
        list(arguments),
        dict(env),
        [str(options.get("cwd") or os.getcwd())],
        options,
    )


def _fork(
    nursery: str,
    module: str,
    arguments: list[str],
    env: dict[str, str],
    here: list[str],
    options: dict[str, Any],
) -> Forked:
    null = os.open(os.devnull, os.O_RDWR)
    pipes: dict[str, tuple[int, int]] = {}

    def end_of(name: str, default: int) -> int:
        given = options.get(name)
        if given == subprocess.PIPE:
            pipes[name] = os.pipe()
            return pipes[name][1]
        if given == subprocess.DEVNULL:
            return null
        if given == subprocess.STDOUT:
            return fds[1]
        return (
            default if given is None else given if isinstance(given, int) else int(given.fileno())
        )

    fds: list[int] = []
    for default, name in enumerate(("stdin", "stdout", "stderr")):
        fds.append(end_of(name, default))
    passed = options.get("pass_fds", ())
    wanted = {
        "module": module,
        "arguments": arguments,
        "numbers": [0, 1, 2, *passed],
        "cwd": str(options.get("cwd") or os.getcwd()),
        "env": env,
        "here": here,
        "new_session": bool(options.get("start_new_session")),
        "process_group": options.get("process_group"),
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(nursery)
    socket.send_fds(connection, [json.dumps(wanted).encode()], [*fds, *passed])
    for fd in (null, *(write for _, write in pipes.values())):
        os.close(fd)
    pid = int(connection.recv(64))
    ends = [pipes[name][0] if name in pipes else None for name in ("stdout", "stderr")]
    return Forked(connection, pid, *ends)


_Popen = subprocess.Popen
_AT_START = at_start(ONE_THREAD | os.environ)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--nursery"]:
        if os.fork():
            os._exit(0)
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        sys.path[0] = os.getcwd()  # as `python -m phalanx` has it
        _run_command(sys.argv[1:])
