"""The shape of a user's own model, measured in another process so that planning itself never
imports torch.

The other process builds the module on the meta device and prints one line of JSON. The answer is
kept under a digest of the factory's source and arguments, and of the code that made it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest
from phalanx.core.errors import ExitCode, LayoutError
from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.process_stat import read_run_and_delay_s
from phalanx.core.registry import is_foreign
from phalanx.core.secrets import Redactor
from phalanx.job.hugging_face import find_config_file, is_hugging_face, read_model_config
from phalanx.job.param_holder import ParamHolder
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.stored import parse_stored_shape, require_shape_values
from phalanx.job.shapes.traced import parse_traces
from phalanx.job.user_dataset import is_given_unknown_samples

PROBE_MODULE = "phalanx.nn.probe"
PROBE_TIMEOUT_S = 300.0
PROGRESS_INTERVAL_S = 0.5
SampleForm = Mapping[str, tuple[Sequence[int], str]]
"""(shape, dtype) of each entry of a sample, by its flat name."""
TellProgress = Callable[[int, int, str], None]
"""Is told how many of how many parts of the work are done, and in words what is done now."""
# Keyed by the sources of the user's module.
SHAPE_CACHE_DIR = Path(os.path.expanduser("~/.cache/phalanx/shapes"))
# Their code makes the probe's answer: one of another phalanx is not taken.
PROBE_CODE_ROOMS = ("nn", "mesh")

EXTRA_FACT_KEYS: Any = (
    "vocab_size",
    "max_positions",
    "image_size",
    "patch_size",
    "num_channels",
    "num_classes",
)


def measure_foreign_shape(
    job: Job,
    *,
    is_traced: bool = True,
    sample_form: SampleForm | None = None,
    tell: TellProgress | None = None,
) -> MeasuredModule | None:
    """The shape of a user's own module, as far as it can be measured; None for a built-in model.

    With `is_traced` also what a microbatch of the job takes, where its samples are known, or their
    form is given. `tell` is called twice a second while the module is measured; never where the
    answer is known.
    """
    if job.model.kind is None or not is_foreign(job.model.kind):
        return None
    trace = build_trace_request(job, sample_form) if is_traced else None
    return probe_foreign_shape(
        job.model.kind, job.model.args, SHAPE_CACHE_DIR, trace=trace, tell=tell
    )


def build_trace_request(job: Job, sample_form: SampleForm | None = None) -> dict[str, Any] | None:
    """The request with which the probe traces a microbatch of the job; None where a user's own
    module gets samples of their own, and `sample_form` does not say their forms."""
    own_samples = {}
    if is_given_unknown_samples(job):
        if sample_form is None:
            return None
        own_samples = {
            "sample_form": {
                key: [list(shape), dtype] for key, (shape, dtype) in sample_form.items()
            }
        }
    return own_samples | {
        "seq_len": job.data.seq_len,
        "precisions": _list_precisions(job),
        "objective": job.model.objective,
        "loss_chunk_tokens": job.train.loss_chunk_tokens,
        "document_masks": job.data.document_masks,
    }


def _list_precisions(job: Job) -> list[str]:
    """The precisions that a plan of the job may ask for: one, unless the device decides."""
    if job.precision.compute != "auto":
        return [job.precision.compute]
    # Without a GPU "auto" is fp32 (phalanx.plan.precision); each trace takes seconds.
    if job.cluster.device == "cpu" or not Path("/proc/driver/nvidia").exists():
        return ["fp32"]
    return ["fp32", "bf16"]


def probe_foreign_shape(
    kind: str,
    args: Mapping[str, Any],
    cache_dir: Path | None = None,
    *,
    trace: Mapping[str, Any] | None = None,
    probe_module: str = PROBE_MODULE,
    timeout_s: float = PROBE_TIMEOUT_S,
    tell: TellProgress | None = None,
) -> MeasuredModule:
    """Build `kind` ("package.module:factory") with `args` in a subprocess, count what it holds, and
    trace what `trace` (`build_trace_request`) asks for. `tell` hears how far that is.

    Raises LayoutError with the last line of the subprocess's errors if the model cannot be built.
    """
    if is_hugging_face(kind):
        # What is wrong with the file is said here, without another process.
        read_model_config(kind, args)
    cached = _find_shape_cache_file(kind, args, cache_dir, trace)
    if cached is not None and (known := _read_cached_shape(cached)) is not None:
        return known
    shape = _parse_shape(kind, _run_probe(kind, args, trace, probe_module, timeout_s, tell))
    if cached is not None:
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            # Atomic, for other processes read it; not durable, for it can be measured again.
            write_json_atomically(cached, shape.to_json(), durable=False)
        except OSError:  # the cache only saves time
            pass
    return shape


def _run_probe(
    kind: str,
    args: Mapping[str, Any],
    trace: Mapping[str, Any] | None,
    probe_module: str,
    timeout_s: float,
    tell: TellProgress | None,
) -> str:
    """The output of `python -m probe_module '{"kind": ..., "args": ...}'`."""
    request: dict[str, Any] = {"kind": kind, "args": dict(args)}
    if trace is not None:
        request["trace"] = dict(trace)
    try:
        return run_request_process(probe_module, request, timeout_s, tell)
    except RefusedRequestError as error:
        # Of a config.json: it names the file and the setting, and there is nothing else to check.
        if is_hugging_face(kind):
            raise LayoutError(str(error)) from None
        raise _build_probe_error(kind, str(error)) from None
    except ChildProcessError as error:
        raise _build_probe_error(kind, str(error)) from None


class ProgressPipe:
    """A pipe through which a process says how far it is, beside the output of the user's code."""

    def __init__(self, tell: TellProgress) -> None:
        self._tell, self._text, self._latest = tell, "", (0, 1, "starts")
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    def tell_latest(self) -> None:
        """Tell what the process said last."""
        try:
            self._text += os.read(self._reader, 2**16).decode(errors="replace")
        except BlockingIOError:
            pass
        *lines, self._text = self._text.split("\n")
        if lines:
            num_done, num_parts, words = json.loads(lines[-1])
            self._latest = num_done, num_parts, words
        self._tell(*self._latest)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.writer)


def make_progress_writer(request: Mapping[str, Any]) -> TellProgress:
    """A function that writes into the pipe of the process that asked, if it wants to hear."""
    writer = request.get("progress_fd")
    if writer is None:
        return lambda num_done, num_parts, words: None
    return lambda num_done, num_parts, words: _write_progress(
        int(writer), [num_done, num_parts, words]
    )


def _write_progress(writer: int, progress: list[Any]) -> None:
    try:
        os.write(writer, f"{json.dumps(progress)}\n".encode())
    except OSError:  # the user's code has closed it: the work itself goes on
        pass


class RefusedRequestError(ChildProcessError):
    """The process ended with an error that is for the user as it is."""


def run_request_process(
    module: str,
    request: Mapping[str, Any],
    timeout_s: float = PROBE_TIMEOUT_S,
    tell: TellProgress | None = None,
) -> str:
    """The output of `python -m module REQUEST`, with the request as JSON. The process sees our
    sys.path. `tell` hears what it writes with `make_progress_writer`.

    Raises ChildProcessError with the last line of its errors; RefusedRequestError if it ended with
    ExitCode.JOB.
    """
    if tell is None:
        return _run_request_process(module, request, timeout_s, None)
    pipe = ProgressPipe(tell)
    try:
        request = {**request, "progress_fd": pipe.writer}
        return _run_request_process(module, request, timeout_s, pipe)
    finally:
        pipe.close()


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print the answer of a request's process on a line of its own: the user's code may have
    written half a line before it."""
    print("", json.dumps(answer), sep="\n", flush=True)


def _run_request_process(
    module: str, request: Mapping[str, Any], timeout_s: float, pipe: ProgressPipe | None
) -> str:
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # "" in sys.path is the current directory: by name, so that it stays ours.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        text=True,
        errors="replace",
        start_new_session=True,  # so that whatever the user's module starts ends with it
        pass_fds=() if pipe is None else (pipe.writer,),
    )
    try:
        printed, errors = _wait_for_output(process, timeout_s, pipe)
    except subprocess.TimeoutExpired:
        raise ChildProcessError(f"it took longer than {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            # Not ended yet: a timeout, or Ctrl-C here. The whole session, as it may have children.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        ending = f"the process ended with {process.returncode}"
        if process.returncode == ExitCode.JOB:
            raise RefusedRequestError(find_last_line(errors) or ending)
        raise ChildProcessError(find_last_line(errors) or ending)
    return printed


def _wait_for_output(
    process: subprocess.Popen[str], timeout_s: float, pipe: ProgressPipe | None
) -> tuple[str, str]:
    """Output and errors of `process`, with what comes through `pipe` told meanwhile. Raises
    TimeoutExpired; for as long as others had the processor, the process is not to blame."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        _, delay_s = read_run_and_delay_s(process.pid)
        left_s = max(0.0, deadline_s + delay_s - time.monotonic())
        try:
            return process.communicate(timeout=min(left_s, PROGRESS_INTERVAL_S))
        except subprocess.TimeoutExpired:
            if not left_s:
                raise
            if pipe is not None:
                pipe.tell_latest()


def _parse_shape(kind: str, printed: str) -> MeasuredModule:
    """The answer among the lines of `printed` (a user's module may print, too), counted."""
    try:
        return _build_module_from_answer(kind, _find_answer(printed))
    # A line of the user's own may be JSON of any form.
    except (ValueError, TypeError, KeyError, AttributeError):
        problem = (
            "the process ended before the model was built: by C's exit, an exec or the like in your"
            " code"
        )
        last_line = find_last_line(printed)
        if last_line:
            problem += f"; its last words: {last_line[:80]!r}"
        raise _build_probe_error(kind, problem) from None


def _build_module_from_answer(kind: str, answer: Mapping[str, Any]) -> MeasuredModule:
    """The module that the probe's answer describes. Raises what a malformed answer raises."""
    sizes = {str(name): math.prod(map(int, shape)) for name, shape, _ in answer["tensors"]}
    blocks = tuple(
        (str(block), _count_params_within(str(block), sizes)) for block in answer["blocks"]
    )
    block_sizes = [size for _, size in blocks]
    num_params, extra_facts = int(answer["num_params"]), answer.get("facts", {})
    facts: dict[str, Any] = {
        key: int(extra_facts[key]) for key in EXTRA_FACT_KEYS if key in extra_facts
    }
    rules = answer.get("shard_rules", {})
    return MeasuredModule(
        kind,
        len(blocks),
        num_params,
        int(answer["num_trainable_params"]),
        max(block_sizes, default=num_params),
        sum(block_sizes),
        num_batchnorms=int(answer.get("num_batchnorms", 0)),
        num_dropouts=int(answer.get("num_dropouts", 0)),
        num_narrow_params=int(answer.get("num_narrow_params", 0)),
        num_idle_layers=int(answer.get("num_idle_layers", 0)),
        takes_document_ids=answer.get("takes_document_ids", "by name"),
        module_names=tuple(map(str, answer.get("names", ()))),
        holders=tuple(ParamHolder(**holder) for holder in answer.get("holders", ())),
        shard_rules=tuple((str(pattern), str(text)) for pattern, text in rules.items()),
        blocks=blocks,
        last_stage=tuple(map(str, answer.get("last_stage", ()))),
        has_attention_seam=bool(answer.get("has_attention_seam", True)),
        traces=parse_traces(answer.get("traces", ())),
        why_untraced=Redactor(os.environ).redact_text(str(answer.get("why_untraced", ""))),
        is_built_whole=bool(answer.get("is_built_whole", False)),
        has_own_samples=bool(answer.get("has_own_samples", False)),
        **facts,
    )


def _find_answer(printed: str) -> dict[str, Any]:
    """The last line that can be the probe's answer: a module may have more to say when the
    process ends, too."""
    for line in reversed(printed.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and "tensors" in answer:
            return answer
    raise ValueError("no line is an answer")


def _count_params_within(block: str, sizes: Mapping[str, int]) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(f"{block}."))


def _build_probe_error(kind: str, why: str) -> LayoutError:
    return LayoutError(
        f"model {kind!r} cannot be built", why=why, fix="check model.kind and model.args"
    )


def find_last_line(text: str) -> str:
    """The last line of `text` with anything in it; "" if there is none."""
    lines = text.strip().splitlines()
    if not lines:
        return ""
    return lines[-1].strip()


def _find_shape_cache_file(
    kind: str,
    args: Mapping[str, Any],
    cache_dir: Path | None,
    trace: Mapping[str, Any] | None = None,
) -> Path | None:
    """The file that caches the shape; None if there is no cache or no source to recognise the
    model by."""
    if is_hugging_face(kind):
        sources = _find_config_sources(kind)
    else:
        sources = find_module_sources(kind.partition(":")[0].split("."))
    # Without a home there is no cache, and no folder that is called "~".
    if cache_dir is None or not cache_dir.is_absolute() or not sources:
        return None
    probe_files: list[Path] = []
    for room in PROBE_CODE_ROOMS:
        probe_files += sorted((Path(__file__).parents[1] / room).glob("*.py"))
    files = list_file_states([*sources, *probe_files])
    return cache_dir / f"shape-{digest([kind, dict(args), trace, files, sys.version])}.json"


def list_file_states(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """(name, size, time of change) of each file, to tell without reading them whether they
    changed."""
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _read_cached_shape(file: Path) -> MeasuredModule | None:
    try:
        shape = parse_stored_shape(read_json(file))
        require_shape_values(shape)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if isinstance(shape, MeasuredModule):
        return shape
    return None


def _find_config_sources(kind: str) -> list[Path]:
    """The file, and what says which transformers is installed."""
    spec = PathFinder.find_spec("transformers", sys.path)
    if spec is None or not spec.origin:
        return []
    return [find_config_file(kind).resolve(), Path(spec.origin)]


def find_module_sources(names: Sequence[str]) -> list[Path]:
    """The module's file and those it most likely imports: the rest of its package, or the files
    beside it.

    Found without importing the packages around it, which may well import torch.
    """
    top = PathFinder.find_spec(names[0], [os.getcwd(), *sys.path])
    if top is None:
        return []
    if top.submodule_search_locations:
        files: list[Path] = []
        for root in top.submodule_search_locations:
            files += Path(root).rglob("*.py")
        return sorted(files)
    if not top.origin:
        return []
    # A lone file may import its neighbours: a change of any of them asks anew.
    return sorted(Path(top.origin).parent.glob("*.py"))
