"""Serve a run's metrics for Prometheus, or print them, alert rules or a Grafana dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._complete import complete_run_directory

if TYPE_CHECKING:
    from phalanx.run.observer.follower import RunFollower

EXAMPLE = "Example: phalanx metrics runs/train-20260101-120000 --port=9464"

DEFAULT_HOST = "127.0.0.1"


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run directory, finished or not.",
            autocompletion=complete_run_directory,
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to serve on.")] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to serve on; 0 takes a free one.")
    ] = 0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics as Prometheus reads them, and end.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the metrics as JSON, and end.")
    ] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="Print alert rules for Prometheus (YAML), and end.")
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Print a dashboard for Grafana (JSON), and end.")
    ] = False,
) -> int:
    """Serve the metrics of a run at /metrics, until Ctrl-C.

    Reads the run directory, and does not disturb the run: live, ended, under any launcher, from any
    machine that sees its files. A job with observe.metrics_port serves its own.
    """
    from phalanx.cli._arguments import refuse_options_without_effect
    from phalanx.cli._json import print_errors_as_json
    from phalanx.core.errors import UsageError

    serving = {"--host": host != DEFAULT_HOST, "--port": port != 0}
    with print_errors_as_json(as_json):
        if rules or dashboard:
            if run is not None or (rules and dashboard):
                raise UsageError(
                    "--rules and --dashboard stand alone",
                    why="they are the same for every run",
                    fix="phalanx metrics --rules, or phalanx metrics --dashboard",
                )
            refuse_options_without_effect(
                f"with {'--rules' if rules else '--dashboard'}",
                {"--json": as_json, "--once": once, **serving},
            )
            _print_rules_or_dashboard(rules=rules)
            return 0
        if run is None:
            raise UsageError(
                "no run is named", fix="phalanx metrics RUN, with RUN a run directory; see --help"
            )
        if not (Path(run) / "events").is_dir():
            raise UsageError(
                "no run is there", where=run, fix="give a directory that phalanx train wrote"
            )
        follower = _open_follower(Path(run))
        if once or as_json:
            refuse_options_without_effect(f"with {'--once' if once else '--json'}", serving)
            _print_metrics(follower, as_json=as_json)
            return 0
        _serve(follower, host, port)
    return 0


def _print_rules_or_dashboard(*, rules: bool) -> None:
    import json

    from phalanx.core.terminal import print_document
    from phalanx.report.prometheus.dashboard import build_dashboard
    from phalanx.report.prometheus.rules import read_alert_rules

    if rules:
        print_document(read_alert_rules().rstrip("\n"))
    else:
        print_document(json.dumps(build_dashboard(), indent=1))


def _open_follower(run_dir: Path) -> RunFollower:
    from phalanx.run.observer.follower import RunFollower

    return RunFollower(run_dir)


def _print_metrics(follower: RunFollower, *, as_json: bool) -> None:
    from phalanx.cli._json import print_json
    from phalanx.core.terminal import print_document
    from phalanx.report.prometheus.exposition import build_metrics_json, render_metrics

    follower.read_all()
    snapshot = follower.build_snapshot()
    if as_json:
        print_json("metrics", build_metrics_json(snapshot), indent=1)
    else:
        print_document(render_metrics(snapshot).rstrip("\n"))


def _serve(follower: RunFollower, host: str, port: int) -> None:
    """Serve what the run directory says, read once a second."""
    import time

    from phalanx.report.prometheus.http_server import open_metrics_server
    from phalanx.run.observer.follower import MetricsPublisher

    server = open_metrics_server(host, port)
    publisher = MetricsPublisher(server, follower, _say_failure)
    server.start()
    try:
        print(f"metrics of {follower.run_name} at {server.url}; Ctrl-C ends it", flush=True)
        follower.read_all()
        while True:
            follower.read_news()
            publisher.publish()
            time.sleep(1.0)
    except KeyboardInterrupt:
        # How it is ended, and no failure.
        print()
    finally:
        server.close()


def _say_failure(reason: str) -> None:
    print(f"phalanx: {reason}", file=sys.stderr, flush=True)
