"""`write_report`: the run as one file that opens anywhere, asks nothing of the network and
trusts nothing it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import write_bytes_atomically
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, build_tag, join_html
from phalanx.report.reduce import collect_run_facts
from phalanx.report.sections.block_norms import has_block_norms, render_block_norms
from phalanx.report.sections.curves import render_curves
from phalanx.report.sections.experts import has_experts, render_experts
from phalanx.report.sections.happenings import draw_happenings
from phalanx.report.sections.header import name_run, name_status, render_header
from phalanx.report.sections.invariants import has_invariants, render_invariants
from phalanx.report.sections.memory import render_memory
from phalanx.report.sections.mesh import has_mesh, render_mesh
from phalanx.report.sections.pipeline import has_pipeline, render_pipeline
from phalanx.report.sections.plan import render_plan
from phalanx.report.sections.raw import (
    collect_raw_events,
    has_raw_events,
    render_raw_events,
)
from phalanx.report.sections.story import (
    has_text_samples,
    render_files,
    render_job,
    render_story,
    render_text_samples,
    select_shown_story,
)
from phalanx.report.sections.stragglers import has_self_times, render_stragglers
from phalanx.report.sections.timing import render_time

# The page shows text of strangers (errors, samples, names of files): should any of it pass as
# markup after all, it can load nothing and reach nobody.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
# Of the page that `phalanx watch` serves, which asks its server for its own newer version.
LIVE_CONTENT_SECURITY_POLICY = f"{CONTENT_SECURITY_POLICY}; connect-src 'self'"


@dataclass(frozen=True)
class LiveState:
    """The words of a page that is served while the run trains about the run's processes."""

    is_over: bool
    processes: str


_NAVIGATION_LINKS = (
    ("training", "Training"),
    ("time", "Time"),
    ("ranks", "Ranks"),
    ("mesh", "Mesh"),
    ("pipeline", "Pipeline"),
    ("experts", "Experts"),
    ("blocks", "Blocks"),
    ("checks", "Checks"),
    ("memory", "Memory"),
    ("plan", "Plan"),
    ("events", "Checkpoints, faults, restarts, resumes"),
    ("text", "Text"),
    ("job", "Job"),
    ("files", "Files"),
    ("raw", "Raw events"),
)


def write_report(run_dir: Path, facts: RunFacts | None = None, *, path: Path | None = None) -> Path:
    """Make the page, `RUN/report.html` or at `path`, from whatever the run has written so far, and
    return where it is.

    `facts` are those of the run, where they have been collected already. Raises ResourceError if
    the page cannot be written; an old page then stays as it was.
    """
    path = path or run_dir / "report.html"
    page = render_page(facts or collect_run_facts(run_dir))
    try:
        write_bytes_atomically(path, page.encode())
    except OSError as error:
        raise build_path_resource_error(
            error, "writing the report", path, place="--out FILE"
        ) from None
    return path


def render_page(facts: RunFacts, *, live: LiveState | None = None) -> str:
    """The page, as text; with `live`, one that keeps itself up to date."""
    facts = replace(facts, raw=collect_raw_events(facts, select_shown_story(facts)[0]))
    policy = CONTENT_SECURITY_POLICY
    if live is not None:
        policy = LIVE_CONTENT_SECURITY_POLICY
    head = build_tag(
        "head",
        build_tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        build_tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        build_tag("title", f"{name_run(facts)}, {name_status(facts)} · phalanx"),
        # Else a browser asks for /favicon.ico.
        build_tag("link", rel="icon", href="data:,"),
        build_tag("style", _read_asset("page.css")),
    )
    body = build_tag(
        "body",
        build_tag("a", "Skip to the numbers", href="#main", class_="skip-link"),
        _render_live_line(live),
        build_tag(
            "div",
            render_header(facts),
            _render_navigation(facts),
            _render_main(facts),
            _render_footer(live),
            class_="page",
        ),
        build_tag("script", _read_asset("page.js")),
        None if live is None else build_tag("script", _read_asset("live.js")),
    )
    return f"<!doctype html>\n{build_tag('html', head, body, lang='en')}\n"


def _read_asset(name: str) -> Html:
    # Html, not text: files of our own go into the page as they are.
    return Html(files("phalanx.report").joinpath(name).read_text("utf-8"))


def _render_live_line(live: LiveState | None) -> Html | None:
    """The line at the top of a live page; live.js says in it when it was updated."""
    if live is None:
        return None
    state, words = "running", live.processes
    if live.is_over:
        state, words = "over", "The run has ended."
    return build_tag(
        "div",
        # A region of its own: screen readers say it when it changes, and not each update.
        build_tag("span", words, role="status", class_="livestate"),
        build_tag("span", class_="updated"),
        build_tag("noscript", " Without JavaScript the page stays as it is: load it again."),
        id="live",
        class_=f"live {state}",
    )


def _render_main(facts: RunFacts) -> Html:
    sections = (
        _render_training, render_time, render_stragglers, render_mesh, render_pipeline,
        render_experts, render_block_norms, render_invariants, render_memory, render_plan,
        render_story, render_text_samples, render_job, render_files, render_raw_events,
    )  # fmt: skip
    return build_tag("main", join_html(section(facts) for section in sections), id="main")


def _render_training(facts: RunFacts) -> Html:
    return render_curves(facts, draw_happenings(facts))


def _render_navigation(facts: RunFacts) -> Html:
    left_out = {
        name
        for name, has in (
            ("ranks", has_self_times),
            ("mesh", has_mesh),
            ("pipeline", has_pipeline),
            ("experts", has_experts),
            ("blocks", has_block_norms),
            ("checks", has_invariants),
            ("text", has_text_samples),
            ("raw", has_raw_events),
        )
        if not has(facts)
    }
    sections = [(name, text) for name, text in _NAVIGATION_LINKS if name not in left_out]
    links = [build_tag("a", text, href=f"#{name}") for name, text in sections]
    return build_tag("nav", links, aria_label="Sections")


def _render_footer(live: LiveState | None) -> Html:
    words = "This file is complete in itself and loads nothing."
    if live is not None:
        words = "Served by phalanx watch to this machine alone."
    return build_tag("footer", f"Written by phalanx. {words}")
