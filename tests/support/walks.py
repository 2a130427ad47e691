"""Follow a page of docs/ as a reader would: its files are written, its commands run, and what it
shows is compared.

Above a fenced block of a page stands what it is:

    <!-- walk: file PATH -->     the block is the content of that file
    <!-- walk: change PATH -->   the block is a diff of it: "-", "+" and context; "@@" begins another place
    <!-- walk: run -->           its lines are commands, one after the other ("run 3": each ends with that code)
    <!-- walk: run together -->  ... side by side
    <!-- walk: says -->          the commands before it print these lines, in this order; "..." stands for anything

"long" behind one of these: only where the caller has the time.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import Done, environment, finish, start

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"<!-- walk: (?P<what>[^\n]*?) -->\n```\w*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAMS = {"phalanx": ["-m", "phalanx"], "pytest": ["-m", "pytest"], "python": []}
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Said:
    """A command of a page and how it ended."""

    command: str
    done: Done


def checkout(place: Path) -> Path:
    """What a contributor has: the package and the tests that new implementations meet, to be
    changed at will."""
    root = place / "checkout"
    ignore = shutil.ignore_patterns("*.so")
    shutil.copytree(ROOT / "src" / "phalanx", root / "src" / "phalanx", ignore=ignore)
    shutil.copytree(ROOT / "tests" / "contracts", root / "tests" / "contracts")
    (root / "tests" / "distributed").mkdir()
    shutil.copy2(
        ROOT / "tests" / "distributed" / "test_context_parallel.py", root / "tests" / "distributed"
    )
    shutil.copytree(ROOT / "tests" / "support", root / "tests" / "support")
    shutil.copy2(ROOT / "tests" / "conftest.py", root / "tests")
    shutil.copy2(ROOT / "pyproject.toml", root)
    return root


def follow(
    page: str,
    place: Path,
    *,
    also: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    long: bool = False,
    runs: bool = True,
) -> list[Said]:
    """Every marked block of docs/`page`, in `place`.

    `also`: arguments of each `phalanx train`, to make it short. Without `runs` files are written
    and changed, and nothing is run.

    Raises AssertionError with the command and its words where something is not as the page says.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text.count("<!-- walk:") == len(BLOCK.findall(text)), "a mark without a block"
    assert {block["what"].split()[0] for block in BLOCK.finditer(text)} <= {
        "file",
        "change",
        "run",
        "says",
    }
    said: list[Said] = []
    last = ""
    for block in BLOCK.finditer(text):
        what, *words = block["what"].split()
        if what == "file":
            path = place / words[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"], encoding="utf-8")
        elif what == "change":
            _change(place / words[0], block["text"])
        elif what == "run" and runs and ("long" not in words or long):
            code = next((int(word) for word in words if word.isdecimal()), 0)
            found = _run(block["text"], place, also, env or {}, together="together" in words)
            for each in found:
                assert each.done.code == code, f"{each.command}\n{each.done.out}\n{each.done.err}"
            said += found
            last = "\n".join(each.done.out + each.done.err for each in found)
        elif what == "says" and runs and ("long" not in words or long):
            _require(block["text"].splitlines(), last.splitlines())
    return said


def _change(path: Path, diff: str) -> None:
    """Each place that the diff shows is found by its lines, and must be the only one."""
    text = path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] or line for line in lines if line[0] in f"{sign} \n") for sign in "-+"
        )
        assert not lines or text.count(before) == 1, (
            f"{text.count(before)} places in {path} are these:\n{before}"
        )
        text = text.replace(before, after) if lines else text
    path.write_text(text, encoding="utf-8")


def _run(
    text: str, place: Path, also: Sequence[str], env: Mapping[str, str], *, together: bool
) -> list[Said]:
    variables = environment(
        PYTHONPATH=os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT / "src"))))
    )
    lines = text.replace("\\\n", " ").splitlines()
    running: list[subprocess.Popen[str] | Done] = []
    for line in lines:
        program, *arguments = shlex.split(line.removeprefix("$ "), comments=True)
        more = also if (program, arguments[0]) == ("phalanx", "train") else ()
        command = [sys.executable, *PROGRAMS[program]]
        process = start(*arguments, *more, cwd=place, env=variables, command=command)
        running.append(process if together else finish(process, DEADLINE_S))
    done = [each if isinstance(each, Done) else finish(each, DEADLINE_S) for each in running]
    return [Said(line, each) for line, each in zip(lines, done, strict=True)]


def _require(wanted: Sequence[str], said: Sequence[str]) -> None:
    """Each of `is_needed` is a line of `said`, in this order."""
    rest = iter(said)
    for line in wanted:
        words = line.rstrip()
        if words in ("", "...") or words.startswith("$ "):
            continue
        pattern = ".*".join(
            r"\s+".join(map(re.escape, part.split())) for part in words.split("...")
        )
        assert any(re.search(pattern, told) for told in rest), "\n".join(
            (f"not said, or not here: {line}", "", *said)
        )
