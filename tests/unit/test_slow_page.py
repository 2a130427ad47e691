"""The table of symptoms in docs/slow.md: each row has a command that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli._app import UsageMistake, build_app

PAGE = Path(__file__).parents[2] / "docs" / "slow.md"
LEAST_ROWS = 12


def list_rows() -> list[list[str]]:
    """Cells of the table's rows: symptom, commands, where the answer is."""
    section = PAGE.read_text(encoding="utf-8").split("## By what you see\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def parse_command(text: str) -> None:
    """Raises UsageMistake or AssertionError for a line that `phalanx` does not take."""
    program, *arguments = shlex.split(text)
    assert program == "phalanx"
    command, context = build_app(), None
    # Verbs down to the one that does it: options are parsed, and nothing is run.
    while hasattr(command, "get_command"):
        context = command.make_context(program, list(arguments[:1]), parent=context)
        name = arguments.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"no verb {name}"
        program = name
    command.make_context(program, arguments, parent=context)


def test_each_symptom_has_a_command_that_there_is() -> None:
    rows = list_rows()
    assert len(rows) >= LEAST_ROWS
    for symptom, commands, answer in rows:
        assert answer, symptom
        lines = re.findall(r"`(phalanx [^`]*)`", f"{commands} {answer}")
        assert re.search("`phalanx", commands), symptom
        for line in lines:
            if line != "phalanx train":
                parse_command(line.replace("step:N", "step:3"))


@pytest.mark.parametrize(
    "line", ["phalanx doctor RUN", "phalanx bench links", "phalanx report RUN --bogus"]
)
def test_a_command_that_there_is_not_is_noticed(line: str) -> None:
    with pytest.raises((AssertionError, UsageMistake)):
        parse_command(line)
