"""`python -m phalanx.nn.probe JSON`: describe a user's model from the meta device, for the
torch-free planner."""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import ExitCode, PhalanxError
from phalanx.core.parent import kill_this_process_with_parent
from phalanx.core.printable import describe_foreign_error
from phalanx.core.uncaught import is_library_file
from phalanx.job.module_probe import TellProgress, make_progress_writer, print_answer
from phalanx.job.schema import Model
from phalanx.mesh.blocks import find_repeated_blocks, list_last_stage_module_names
from phalanx.mesh.linear import collect_shard_rules_of_module, iterate_parameter_holders
from phalanx.mesh.logical import full_name
from phalanx.mesh.seams import has_attention_seam
from phalanx.nn import build
from phalanx.nn.hugging_face.adapter import SHAPE_FACTS_ATTRIBUTE, resolve_model_factory
from phalanx.nn.module_trace import MAX_BATCHES, trace_module_for_planner

NUM_PARTS_BEFORE_TRACES = 2
"""Building the module, and recording that; then one part for each microbatch that is traced."""


def describe_module_for_planner(
    kind: str,
    args: dict[str, object],
    trace: Mapping[str, Any] | None = None,
    tell: TellProgress = lambda num_done, num_parts, words: None,
) -> dict[str, object]:
    """Parameter names, shapes and blocks of `kind(**args)`, without allocating its weights where
    the factory can; and the traces that `trace` asks for. `tell` hears how far this is."""
    num_parts = NUM_PARTS_BEFORE_TRACES
    if trace is not None:
        num_parts += MAX_BATCHES * len(trace["precisions"])
    tell(0, num_parts, "builds the module without weights")
    factory = resolve_model_factory(kind)
    try:
        with torch.device("meta"):
            module = factory(**args)
    except PhalanxError:
        raise
    except Exception:
        # It reads numbers of its weights, say: then with weights, whose error is the user's.
        module = factory(**args)
    if not isinstance(module, torch.nn.Module):
        raise PhalanxError(f"{kind} returned {type(module).__name__}, not an nn.Module")
    # Nothing says what its forward takes, and its layers are of no class that could be cut.
    if isinstance(module, torch.jit.ScriptModule):
        raise PhalanxError(
            f"{kind} returned a module of torch.jit; return the module it was made of"
        )
    description = {
        **_describe_parameters(module),
        "num_batchnorms": sum(isinstance(part, _BatchNorm) for part in module.modules()),
        "num_dropouts": sum(map(_is_dropout_layer, module.modules())),
        "num_idle_layers": _count_idle_layers(module),
        "takes_document_ids": _find_how_document_ids_are_taken(module),
        "names": [full_name(name) for name, _ in module.named_modules()],
        "holders": [vars(holder) for holder in iterate_parameter_holders(module)],
        "shard_rules": collect_shard_rules_of_module(module),
        "blocks": _list_block_names(module),
        "last_stage": list(list_last_stage_module_names(module)),
        "has_attention_seam": has_attention_seam(module),
        "facts": getattr(module, SHAPE_FACTS_ATTRIBUTE, {}),
    }
    if 4 * int(str(description["num_params"])) >= get_block_sizes().recorded_init_bytes:
        tell(1, num_parts, "records how its weights are made")
        model = Model.model_validate({"kind": kind, "args": args})
        description["is_built_whole"] = not build.can_build_without_memory(model)
    # Last, for a trace takes the module's weights from it.
    if trace is not None:
        description |= trace_module_for_planner(
            module,
            kind,
            trace,
            lambda num_done, num_traces, words: tell(
                NUM_PARTS_BEFORE_TRACES + num_done, NUM_PARTS_BEFORE_TRACES + num_traces, words
            ),
        )
    return description


def _describe_parameters(module: torch.nn.Module) -> dict[str, object]:
    num_params = num_trainable = num_narrow = 0
    tensors = []
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise PhalanxError(
                f"{name} has no shape yet: call lazy layers once with a sample in the factory"
            )
        num_params += parameter.numel()
        if parameter.requires_grad:
            num_trainable += parameter.numel()
            if parameter.dtype.itemsize < torch.float32.itemsize:
                num_narrow += parameter.numel()
        dtype = str(parameter.dtype).removeprefix("torch.")
        tensors.append([full_name(name), list(parameter.shape), dtype])
    return {
        "num_params": num_params,
        "num_trainable_params": num_trainable,
        "num_narrow_params": num_narrow,
        "tensors": tensors,
    }


def _list_block_names(module: torch.nn.Module) -> list[str]:
    blocks = set(map(id, find_repeated_blocks(module)))
    return [full_name(name) for name, part in module.named_modules() if id(part) in blocks]


def _find_how_document_ids_are_taken(module: torch.nn.Module) -> str:
    parameters = inspect.signature(module.forward).parameters
    if "document_ids" in parameters:
        return "by name"
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "as any keyword"
    return "no"


def _count_idle_layers(module: torch.nn.Module) -> int:
    """Dropout and BatchNorm layers in evaluation mode; 0 where that is likely meant so, of a module
    with frozen parameters."""
    if module.training and not all(parameter.requires_grad for parameter in module.parameters()):
        return 0
    layers = (p for p in module.modules() if isinstance(p, _BatchNorm) or _is_dropout_layer(p))
    return sum(not layer.training for layer in layers)


def _is_dropout_layer(part: torch.nn.Module) -> bool:
    """Dropout layers, and torch's attention and recurrent layers, which hold a probability
    themselves."""
    probability = getattr(part, "dropout", 0.0)
    if isinstance(part, _DropoutNd):
        probability = part.p
    # A user's `dropout` may be a module, too.
    return isinstance(probability, float) and probability > 0


def format_user_error_location(error: BaseException) -> str:
    """ "model.py:12: " for the innermost line of the user's own code, or nothing."""
    return format_innermost_user_frame(traceback.extract_tb(error.__traceback__))


def format_innermost_user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost frame of the user's own code as "model.py:12: "; "" if there is none."""
    for frame in reversed(frames):
        if is_library_file(frame.filename):
            continue
        return f"{Path(frame.filename).name}:{frame.lineno}: "
    return ""


def summarize_error(error: BaseException) -> str:
    """The error as the planner shows it: its line in the user's code, its type, its message."""
    return " ".join(f"{format_user_error_location(error)}{describe_foreign_error(error)}".split())


@contextmanager
def report_os_exit_of_user_code() -> Iterator[None]:
    """Have os._exit of this process, called by user code, say where before it ends with code 1.

    Not in its children, which end so after a fork.
    """
    leave, pid = os._exit, os.getpid()

    def say_and_leave(status: int) -> NoReturn:
        if os.getpid() == pid:
            location = format_innermost_user_frame(traceback.extract_stack()[:-1])
            print(
                f"{location}os._exit({status}) was called before the model was built",
                file=sys.stderr,
                flush=True,
            )
            # Not `status`: 0 would look as if the model had been described.
            leave(1)
        leave(status)

    os._exit = say_and_leave
    try:
        yield
    finally:
        os._exit = leave


def _answer_probe_request(request: Mapping[str, Any]) -> dict[str, object]:
    return describe_module_for_planner(
        request["kind"],
        request.get("args", {}),
        request.get("trace"),
        make_progress_writer(request),
    )


if __name__ == "__main__":
    kill_this_process_with_parent()
    # Last, as in ranks: nothing in the user's folder stands for a library that torch imports late.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    request = json.loads(sys.argv[1])
    try:
        with report_os_exit_of_user_code():
            print_answer(_answer_probe_request(request))
    except PhalanxError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.JOB)
    except (Exception, SystemExit) as error:  # the user's own code
        traceback.print_exc()
        sys.exit(summarize_error(error))
