"""Weights & Biases: the run's curves and its job in `RUN/wandb`, on a server only where the user
asked for one.

Offline, unless WANDB_MODE, WANDB_API_KEY or an earlier `wandb login` says otherwise. All attempts
of a run, and all resumptions, are one W&B run: its id is kept in `RUN/wandb/run-id`.
"""

from __future__ import annotations

import netrc
import os
import secrets
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from phalanx.core.registry import import_optional_dependency
from phalanx.observe.events import Envelope
from phalanx.observe.outlet import Sink
from phalanx.observe.sinks._metrics import (
    EventMetricsExtractor,
    read_job_sections,
    read_or_store_run_id,
)

REQUIRES = ("wandb",)
PRELOAD: tuple[str, ...] = ()
# wandb hooks sys.exit, starts threads and a server of its own, and may wait for the network
IS_APART = True
INIT_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 2.0  # what a killed run may lose of its local file
DEFAULT_SERVER = "https://api.wandb.ai"
# Nothing of the machine, the user's code, its output or its packages: curves and the job.
QUIET_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": FLUSH_TIMEOUT_S,
}


def environment(run_dir: Path) -> dict[str, str]:
    return {
        "WANDB_INIT_TIMEOUT": str(INIT_TIMEOUT_S),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": str(run_dir / "wandb" / "cache"),
        "WANDB_DATA_DIR": str(run_dir / "wandb" / "cache"),
    }


def open_sink(run_dir: Path) -> Sink:
    """A run of wandb's. Raises what wandb raises if a server was asked for that refuses us."""
    wandb = import_optional_dependency(
        "wandb", extra="wandb", needed_for='observe.sinks = ["wandb"]'
    )
    directory = run_dir / "wandb"
    run_id, _ = read_or_store_run_id(
        directory / "run-id", os.environ.get("WANDB_RUN_ID") or _draw_run_id()
    )
    wish, why = choose_wandb_mode(os.environ)
    try:
        run = _start_wandb_run(wandb, run_dir, run_id, wish)
    except wandb.Error as error:  # not reachable, or not allowed in
        if wish == "offline":
            raise
        wandb.teardown()
        run = _start_wandb_run(wandb, run_dir, run_id, "offline")
        why = f"offline, since the server cannot be used: {error}"
    return WandbSink(
        run,
        EventMetricsExtractor(run_dir),
        f"{_describe_where_run_is_shown(run, directory)} ({why})",
    )


def choose_wandb_mode(environ: Mapping[str, str]) -> tuple[str, str]:
    """wandb's mode and the reason. Nothing goes over the network unless somebody asked for it."""
    mode = environ.get("WANDB_MODE", "").strip()
    if mode:
        return mode, f"WANDB_MODE={mode}"
    if environ.get("WANDB_API_KEY"):
        return "online", "WANDB_API_KEY is set"
    if _is_logged_in(environ):
        return "online", "logged in"
    return "offline", "not logged in"


def _is_logged_in(environ: Mapping[str, str]) -> bool:
    """True if `wandb login` left an entry for the server in the netrc file."""
    host = urlsplit(environ.get("WANDB_BASE_URL") or DEFAULT_SERVER).hostname or ""
    home = Path(environ.get("HOME") or "/")
    for path in (environ.get("NETRC"), home / ".netrc", home / "_netrc"):
        try:
            if path and host in netrc.netrc(path).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _start_wandb_run(wandb: Any, run_dir: Path, run_id: str, mode: str) -> Any:
    # Not every release has all of them.
    quiet = {
        name: value for name, value in QUIET_SETTINGS.items() if name in wandb.Settings.model_fields
    }
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "phalanx",
        name=os.environ.get("WANDB_NAME") or run_dir.resolve().name,
        id=run_id,
        # Continues the run of this id where there is one, else begins it.
        resume="allow",
        mode=mode,
        dir=str(run_dir),
        config=read_job_sections(run_dir),
        allow_val_change=True,  # a resumed run may train for more steps
        settings=wandb.Settings(**quiet),
    )
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def _describe_where_run_is_shown(run: Any, directory: Path) -> str:
    if run.disabled:
        return "writes nothing"
    if run.offline:
        return f"writes {directory}; `wandb sync {directory}/offline-run-*` uploads it"
    return f"shows the run at {run.url}"


def _draw_run_id() -> str:
    # As long as the ids that wandb makes.
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


class WandbSink:
    """Turns rank 0's facts into rows of wandb's history. `greeting`: where they are to be seen."""

    def __init__(self, run: Any, metrics: EventMetricsExtractor, greeting: str) -> None:
        self.greeting = greeting
        self._run, self._metrics = run, metrics
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        """A row per step; what a later attempt does again, wandb leaves out, as its rows only go
        forward."""
        point = self._metrics.extract_metric_point(envelope)
        if point is not None and self._is_open:
            self._run.log(point.values | {"step": point.step}, step=point.step)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._run.finish(exit_code=0 if self._metrics.final_status == "finished" else 1)
