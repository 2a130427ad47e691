"""What counts as a secret, what is left of a text without it, and logs that hold none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from phalanx.core.logs import RedactedStream, overwrite_secrets_in_file
from phalanx.core.secrets import (
    Redactor,
    explain_secret_in_job,
    find_secret_values_by_variable,
    is_secret_name,
)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "WANDB_API_KEY",
            "HF_TOKEN",
            "hf_token",
            "GITHUBTOKEN2",
            "AWS_SECRET_ACCESS_KEY",
            "PGPASSWORD",
            "DB_PASS",
        ),
        *(
            "apiKey",
            "MY_SECRETS",
            "SLACK_WEBHOOK_URL",
            "SERVICE_CREDENTIALS",
            "SENTRY_DSN",
            "SSH_PASSPHRASE",
        ),
        *(
            "MYSQL_PWD",
            "db_pwd",
            "AZURE_STORAGE_CONNECTION_STRING",
            "ConnectionString",
            "PG_CONN_STR2",
        ),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PWD",
            "OLDPWD",
            "OLD_PWD",
            "CONNECTION_TIMEOUT",
            "QUERY_STRING",
            "PATH",
            "HOME",
            "TOKENIZERS_PARALLELISM",
            "MAX_TOKENS",
            "KEYBOARD",
            "XAUTHORITY",
            "",
        ),
        *(
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "SSH_AUTH_SOCK",
            "KEY_PATH",
            "SECRETARY",
            "PASSENGERS",
            "COMPASS",
        ),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_short_values_are_words_and_not_secrets(tmp_path: Path) -> None:
    environ = {
        "A_KEY": "1",
        "B_TOKEN": "true",
        "C_SECRET": "seven77",
        "D_PASSWORD": "",
        "E_CREDENTIALS": str(tmp_path),
    }
    assert find_secret_values_by_variable(environ) == {}
    assert Redactor(environ).redact_text("1 true seven77") == "1 true seven77"


def test_passwords_in_urls_are_secrets_of_any_variable() -> None:
    environ = {
        "HTTP_PROXY": "http://me:p%40ssw0rd!@proxy:3128",
        "HOMEPAGE": "http://example.org/@someone",
    }
    redactor = Redactor(environ)
    assert (
        redactor.redact_text("via http://me:p%40ssw0rd!@proxy:3128")
        == "via http://me:***@proxy:3128"
    )
    assert redactor.redact_text("p@ssw0rd!") == "***"


BY_PLACE = {
    "postgres://me:pw@host/db": "postgres://me:***@host/db",
    "postgres://:p@ss@host": "postgres://:***@host",
    '{"url": "redis://u:x1@h:6379", "who": "me@home"}': (
        '{"url": "redis://u:***@h:6379", "who": "me@home"}'
    ),
    "git clone https://ghp_0123456789abcdefABCDEF@github.com/a/b": (
        "git clone https://***@github.com/a/b"
    ),
    "https://h/x?v=1&token=t1&api_key=k#access_token=a": (
        "https://h/x?v=1&token=***&api_key=***#access_token=***"
    ),
    '"GET /b?sv=2022&sig=a%2Fb%3D HTTP/1.1" 200': '"GET /b?sv=2022&sig=*** HTTP/1.1" 200',
    "https://s3/o?X-Amz-Credential=c&X-Amz-Date=2024&X-Amz-Signature=5f": (
        "https://s3/o?X-Amz-Credential=***&X-Amz-Date=2024&X-Amz-Signature=***"
    ),
    "https://maps/?key=AIzaSy0123456789abc": "https://maps/?key=***",
    "jdbc:sqlserver://h;user=sa;password=pw;encrypt=true": (
        "jdbc:sqlserver://h;user=sa;password=***;encrypt=true"
    ),
    "Endpoint=x;AccountKey=abc/def==;Suffix=y": "Endpoint=x;AccountKey=***;Suffix=y",
}


@pytest.mark.parametrize(("text", "hidden"), BY_PLACE.items())
def test_a_secret_is_known_by_its_place_whatever_its_length(
    text: str, hidden: str, tmp_path: Path
) -> None:
    """In what Python prints, and in a log that something else wrote; twice changes nothing."""
    assert Redactor({}).redact_text(text) == Redactor({}).redact_text(hidden) == hidden
    (tmp_path / "log").write_text(f"one\n{text}\nend")
    overwrite_secrets_in_file(tmp_path / "log", [])
    log = (tmp_path / "log").read_text()
    assert re.sub(r"\*+", "***", log) == f"one\n{hidden}\nend"
    assert len(log) == len(text) + len("one\n\nend")


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8080/a@b",
        "see http://host:80,me@home or http://host:80 and me@home",
        "ssh://git@github.com/a/b.git",
        "postgres://{user}:{password}@{host}?token={token}&sig=$SIG",
        "https://h/?sort_key=length&max_tokens=5&tokenizer=bpe&page=2",
        "step 3: loss=2.5 token=17; key=3",
        "python -m x --password-file=a?b",
    ],
)
def test_what_has_the_place_of_no_secret_stays(text: str) -> None:
    assert Redactor({}).redact_text(text) == text


def test_what_a_variable_holds_by_place_is_found_alone() -> None:
    """Unless it is so short that it would blank out words."""
    environ = {
        "DATABASE": "postgres://me:pw@host",
        "BLOB": "https://a.blob/c?sv=1&sig=0123456789ab",
        "SQL_CONNECTION_STRING": "Server=tcp:x;Password=correct-horse",
    }
    assert (
        Redactor(environ).redact_text("pw 0123456789ab correct-horse Server=tcp:x")
        == "pw *** *** Server=tcp:x"
    )


SECRET = 'a"b\\c é%20+&1'
SPELLINGS = [
    SECRET,
    json.dumps(SECRET),
    json.dumps(SECRET, ensure_ascii=False),
    repr(SECRET),
    quote(SECRET, safe=""),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_secret_is_found_however_it_is_spelled(spelling: str) -> None:
    hidden = Redactor({"A_KEY": SECRET}).redact_text(f"<{spelling}>")
    assert "***" in hidden
    assert SECRET[-4:] not in hidden


def test_a_private_key_is_found_line_by_line_and_squeezed() -> None:
    key = "-----BEGIN KEY-----\nabcdefghijkl\nmnopqrstuvwx\n-----END KEY-----"
    redactor = Redactor({"DEPLOY_KEY": key})
    assert redactor.redact_text(" ".join(key.split())) == "***"
    assert redactor.redact_text("line abcdefghijkl\nmnopqrstuvwx") == "line ***\n***"


def test_the_longest_secret_wins_and_later_ones_count() -> None:
    environ = {"A_KEY": "abcdefgh", "B_KEY": "abcdefghijkl"}
    redactor = Redactor(environ)
    assert redactor.redact_text("abcdefghijkl") == "***"
    environ["C_KEY"] = "set-later"
    assert redactor.redact_value({"x": ["set-later", 1, None, True]}) == {
        "x": ["***", 1, None, True]
    }


CARRIED: list[tuple[str, Any, bool]] = [
    ("api_key", "x", True),
    ("apikey", "x", True),
    ("password", "x", True),
    ("hub_access_token", "x", True),
    ("token", "hf_abcdefghij0123456789", True),
    ("where", "s3://user:pw@host/x", True),
    ("where", "in the middle of ENVIRONS-OWN-SECRET it is", True),
    ("token", "comma", False),
    ("pad_token", "<|endoftext|>", False),
    ("sort_key", "length", False),
    ("num_key_value_heads", "8", False),
    ("where", "https://example.org:80/a@b", False),
    ("where", "https://example.org/x?api_key=x", True),
    ("where", "https://example.org/x?page_token=2&sort_key=a", False),
    ("where", "https://example.org/x?token=hf_abcdefghij0123456789", True),
    ("where", "postgres://{user}:${PASSWORD}@host", False),
    ("connection_string", "Password=x;Server=y", True),
    ("connection_string", "sqlite:///data/x.db", False),
    ("db_pwd", "x", True),
    ("password", "", False),
]


@pytest.mark.parametrize(
    ("name", "value", "is_secret"), CARRIED, ids=[f"{n}={v}" for n, v, _ in CARRIED]
)
def test_what_a_job_may_not_carry(name: str, value: str, is_secret: bool) -> None:
    why = explain_secret_in_job(name, value, {"SOME_TOKEN": "ENVIRONS-OWN-SECRET"})
    assert (why is not None) is is_secret
    assert "ENVIRONS-OWN" not in (why or "")


def test_a_stream_hides_what_is_printed_in_parts_and_by_several_threads(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        stream = RedactedStream(file.fileno(), Redactor({"A_KEY": "abcdefgh"}))
        stream.write("one abcd")
        other = threading.Thread(target=lambda: print("other abcdefgh", file=stream))
        other.start()
        other.join()
        stream.write("efgh two\nno end of line: abcdefgh")
        stream.flush()
        stream.detach()
    assert (tmp_path / "log").read_text() == "other ***\none *** two\nno end of line: ***"


def test_a_log_is_blanked_out_in_place(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xffabcdefgh abcdefghabcdefg \n")
    assert overwrite_secrets_in_file(log, ["abcdefgh", "nowhere!"]) == 2
    assert log.read_bytes() == b"\xff******** ********abcdefg \n"
    log.write_bytes(b"")
    assert overwrite_secrets_in_file(log, ["abcdefgh"]) == 0


def test_redirected_output_of_a_process_keeps_odd_letters_and_no_secrets(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from phalanx.core.logs import redirect_output_to_log;"
        "from phalanx.core.secrets import Redactor;"
        "redirect_output_to_log(Path('logs/x.log'), Redactor(os.environ));"
        "print('é \\udcff', os.environ['A_TOKEN']); print('end', end=''); print(1 / 0)"
    )
    environ = {"A_TOKEN": "abcdefgh", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    log = (tmp_path / "logs" / "x.log").read_text(encoding="utf-8")
    assert log.startswith("é \\udcff ***\n")
    assert "ZeroDivisionError" in log
    assert log.endswith("end")
