"""The call of Trainer before it took TrainingData and RunStorage: it works until 0.2, and warns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.deprecated import warn_renamed
from phalanx.observe.events import Note
from phalanx.train.training_data import TrainingData

_OLD_CALL_TEXT = "Trainer(job, plan, mesh, state, bus, data=..., objective=..., run_dir=...)"
_NEW_CALL_TEXT = (
    "Trainer(job, plan, state, bus, TrainingData(...), storage=RunStorage.open(run_dir))"
)
_OLD_POSITIONAL_PARAMETERS = ("job", "plan", "mesh", "state", "bus")
_TRAINING_DATA_PARAMETERS = ("held_out", "source_weights", "records")

Init = TypeVar("Init", bound=Callable[..., None])


def accept_deprecated_trainer_arguments(init: Init) -> Init:
    """Make the `__init__` of Trainer take its old arguments, too."""

    @functools.wraps(init)
    def init_either_way(self: Any, *args: Any, **named: Any) -> None:
        # Every old call names it, and no new one has it.
        if "objective" not in named:
            init(self, *args, **named)
            return
        warn_renamed(_OLD_CALL_TEXT, _NEW_CALL_TEXT)
        init(self, **_translate_to_new_arguments(args, named))

    return cast(Init, init_either_way)


def _translate_to_new_arguments(args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the new call that mean what the old ones did."""
    # Positional arguments may be fewer than the names: the rest came by name.
    new = dict(zip(_OLD_POSITIONAL_PARAMETERS, args, strict=False)) | dict(named)
    # The state's model has it.
    new.pop("mesh")
    of_data = {name: new.pop(name) for name in _TRAINING_DATA_PARAMETERS if name in new}
    new["data"] = TrainingData(new["data"], new.pop("objective"), **of_data)
    run_dir, token, fence = (new.pop(name, None) for name in ("run_dir", "fencing_token", "fence"))
    # Its name before that.
    token = new.pop("epoch", token)
    if run_dir is None:
        return new
    if fence is None and token is not None:
        fence = RunOwnershipWatch(run_dir, None, token)

    def emit_slow_store(why: str) -> None:
        new["bus"].emit(Note("store_is_slow", {"why": why}))

    url = new["job"].checkpoint.url
    new["storage"] = RunStorage.open(run_dir, url, fence=fence, say=emit_slow_store)
    return new
