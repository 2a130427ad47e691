"""Secrets that are encoded, cut or broken are found; ordinary words are not taken for pieces of
one."""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from phalanx.core.logs import overwrite_secrets_in_file
from phalanx.core.secrets import Redactor, explain_secret_in_job
from phalanx.core.spellings import build_secret_spellings
from phalanx.launch.paths import redact_secrets_in_logs

RANDOM = "sk-Ab3dEf9hIjKl+MnOpQr5tUvWxYz/012345"
PHRASE = "correct horse: battery"
ENVIRON = {"AN_API_KEY": RANDOM, "DB_PASSWORD": PHRASE}


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


WRITTEN: dict[str, Callable[[str], str]] = {
    "base64": b64,
    "a user and base64": lambda secret: f"Authorization: Basic {b64(f'me:{secret}')}",
    "base64 in the middle": lambda secret: b64(f"xy{secret}z"),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
    "base64 in lines": lambda secret: base64.encodebytes(b"x" * 45 + secret.encode()).decode(),
    "base32": lambda secret: base64.b32encode(secret.encode()).decode(),
    "hex": lambda secret: secret.encode().hex(),
    "HEX": lambda secret: secret.encode().hex().upper(),
    "hex with colons": lambda secret: secret.encode().hex(":"),
    "percent": lambda secret: quote(secret, safe=""),
    "all percent": lambda secret: "".join(f"%{byte:02X}" for byte in secret.encode()),
    "JSON": lambda secret: json.dumps({"a": [secret]}),
    "JSON in JSON's text": lambda secret: json.dumps(json.dumps(secret)),
    "bytes": lambda secret: repr(secret.encode()),
    "a broken line": lambda secret: f"{secret[:7]}\n    {secret[7:]}",
    "a continued line": lambda secret: f"{secret[:9]}\\\n{secret[9:]}",
}


@pytest.mark.parametrize(
    "secret", [RANDOM, PHRASE, "pässwörd-ß-9"], ids=["random", "phrase", "letters"]
)
@pytest.mark.parametrize("how", WRITTEN)
def test_a_secret_is_found_however_it_is_written(tmp_path: Path, how: str, secret: str) -> None:
    written = WRITTEN[how](secret)
    shown = Redactor({"A_TOKEN": secret}).redact_text(f"it failed with {written}!")
    assert "***" in shown
    for decoded in (shown, json.dumps(shown)):
        for begin in range(len(secret) - 6):
            assert secret[begin : begin + 7] not in decoded
            assert b64(secret)[begin : begin + 10] not in decoded
            assert secret.encode().hex()[2 * begin : 2 * begin + 16] not in decoded.lower()
    log = tmp_path / "log"
    log.write_text(f"it failed with {written}!\nnext\n")
    assert overwrite_secrets_in_file(log, [secret]) >= 1
    assert log.read_text().count("\n") == f"{written}\nnext\n".count("\n")
    if secret.isascii():
        for begin in range(len(secret) - 6):
            assert secret[begin : begin + 7] not in log.read_text()


@pytest.mark.parametrize(
    "piece",
    [RANDOM[:14], RANDOM[-13:], RANDOM[5:30], f"x{RANDOM[3:20]}=y", f"key={RANDOM[:20]}..."],
)
def test_a_piece_of_a_random_secret_is_found(piece: str) -> None:
    shown = Redactor(ENVIRON).redact_text(f"cut: {piece}")
    assert "***" in shown
    assert not any(RANDOM[at : at + 12] in shown for at in range(len(RANDOM)))


@pytest.mark.parametrize(
    "text",
    [
        "a correct horse, and a battery", "sk-learn sk-Ab3d 012345", "checkpoint step-12345 of run-2024",
        "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", "model.layers.10.attention.q_proj.weight",
        "0123456789abcdef0123456789abcdef", "correct hor", "https://example.org/a/b?page=2",
    ],
)  # fmt: skip
def test_ordinary_words_stay(text: str) -> None:
    assert Redactor(ENVIRON).redact_text(text) == text


def test_short_secrets_and_words_are_not_looked_for_in_pieces() -> None:
    environ = {
        "A_TOKEN": "hunter2hunter2",
        "B_TOKEN": "my-company-production",
        "C_SECRET": "a.b.example.org:8080",
    }
    text = "hunter2 and my-company-prod at a.b.example.org, in my-company-products"
    assert Redactor(environ).redact_text(text) == text


def test_a_job_that_carries_an_encoded_secret_is_refused() -> None:
    assert "AN_API_KEY" in str(explain_secret_in_job("note", b64(RANDOM), ENVIRON))
    assert explain_secret_in_job("note", "correct horse", ENVIRON) is None


def test_only_what_is_new_in_a_log_is_looked_at_again_and_other_attempts_not_at_all(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    mine, earlier = logs / "rank-0000-attempt-01.log", logs / "rank-0000-attempt-00.log"
    for log in (mine, earlier):
        log.write_text("nothing\n" * 20_000)
    redact_secrets_in_logs(tmp_path, ENVIRON)
    known = f"{RANDOM}\n" + "nothing\n" * 20_000
    earlier.write_text(known[: earlier.stat().st_size])  # the same length: as if it had not changed
    with mine.open("a") as file:
        file.write(f"new: {RANDOM} {b64(PHRASE)}\n")
    redact_secrets_in_logs(tmp_path, ENVIRON)
    assert RANDOM in earlier.read_text()
    assert RANDOM not in mine.read_text()
    assert b64(PHRASE)[:10] not in mine.read_text()


def test_of_a_run_that_another_job_has_only_the_own_attempt_is_touched(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    own, theirs, server = (
        logs / name
        for name in ("rank-0000-attempt-03.log", "rank-0000-attempt-04.log", "server.log")
    )
    for log in (own, theirs, server):
        log.write_text(f"{RANDOM}\n")
    redact_secrets_in_logs(tmp_path, ENVIRON, only_attempt=3)
    assert RANDOM not in own.read_text()
    assert theirs.read_text() == server.read_text() == f"{RANDOM}\n"
    assert sorted(os.listdir(logs)) == sorted(log.name for log in (own, theirs, server))


@pytest.mark.parametrize("how", WRITTEN)
def test_the_quick_look_passes_over_nothing_that_the_slow_one_finds(how: str) -> None:
    spellings = build_secret_spellings(((RANDOM, PHRASE),))
    for shift, secret in itertools.product(range(9), (RANDOM, PHRASE)):
        text = (
            f"{'.' * (500 + shift)}\nfound {WRITTEN[how](secret)} and {RANDOM[3:17]}\n{'.' * 500}"
        )
        found = spellings.find_secret_spans(text)
        places = spellings.find_stretches_to_search(text.encode())
        assert places[0][0] > 0
        assert all(
            any(begin <= start and end <= last for begin, last in places) for start, end in found
        )
    assert (
        spellings.find_stretches_to_search(b"step 12 of 100: an ordinary line of a log\n" * 1000)
        == []
    )
