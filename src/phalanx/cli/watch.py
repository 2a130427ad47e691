"""Watch a run while it trains: its page, live in a browser, or its steps in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._options import RunArgument

EXAMPLE = "Example: phalanx watch runs/train-20260101-120000 --terminal"


def command(
    run: RunArgument,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", min=1, max=65535, help="Of the page; without it, a free one."
        ),
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show its steps here instead of a page.")
    ] = False,
) -> int:
    """Serve the page of a run on this machine, up to date while it trains, until Ctrl-C.

    Only requests to 127.0.0.1 with the token of the printed address are answered. With --terminal
    the run's bar and events are shown here, until the run ends. Reads what the run writes, and does
    not disturb it.
    """
    from phalanx.core.errors import UsageError

    run_dir = Path(run)
    if not (run_dir / "events").is_dir():
        raise UsageError(
            "no run is there", where=run, fix="give a directory that phalanx train wrote"
        )
    if terminal:
        from phalanx.cli._watch_terminal import show_run_in_terminal

        if port is not None:
            raise UsageError(
                "--port is of the page, and --terminal shows none", fix="leave one out"
            )
        return show_run_in_terminal(run_dir)
    return _serve_page(run_dir, port or 0)


def _serve_page(run_dir: Path, port: int) -> int:
    from functools import partial

    from phalanx.core.output import say
    from phalanx.launch.liveness import describe_liveness
    from phalanx.report.live.live_page import LivePage
    from phalanx.report.live.page_server import open_page_server

    page = LivePage(run_dir, partial(describe_liveness, run_dir))
    with open_page_server(port, page.render) as server:
        say(
            f"page    {server.url}",
            f"        from another machine: ssh -L {server.port}:127.0.0.1:{server.port} HOST",
            f"        Ctrl-C ends it; {describe_run_beside_page(run_dir)}",
        )
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            # The usual end of watching.
            pass
    return 0


def describe_run_beside_page(run_dir: Path) -> str:
    """Words for what becomes of the run while its page is served: how it ended, if it has."""
    from phalanx.observe.run_end import read_recorded_end
    from phalanx.observe.words import describe_end

    end = read_recorded_end(run_dir)
    if end is None:
        return "the run is not disturbed"
    return f"the run {describe_end(end)}"
