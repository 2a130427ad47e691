"""What counts as a secret, what is left of a text without it, and logs that hold none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from phalanx.core.logs import RedactedStream, blank_out
from phalanx.core.secrets import Redactor, carried_secret, is_secret_name, secret_values


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "hf_token", "GITHUBTOKEN2", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PASS"),
        *("apiKey", "MY_SECRETS", "SLACK_WEBHOOK_URL", "SERVICE_CREDENTIALS", "SENTRY_DSN", "SSH_PASSPHRASE"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PWD", "OLDPWD", "PATH", "HOME", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "XAUTHORITY", ""),
        *("AWS_WEB_IDENTITY_TOKEN_FILE", "SSH_AUTH_SOCK", "KEY_PATH", "SECRETARY", "PASSENGERS", "COMPASS"),
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


def test_short_values_are_words_and_not_secrets(tmp_path: Path) -> None:
    environ = {"A_KEY": "1", "B_TOKEN": "true", "C_SECRET": "seven77", "D_PASSWORD": "", "E_CREDENTIALS": str(tmp_path)}
    assert secret_values(environ) == {}
    assert Redactor(environ).text("1 true seven77") == "1 true seven77"


def test_passwords_in_urls_are_secrets_of_any_variable() -> None:
    environ = {"HTTP_PROXY": "http://me:p%40ssw0rd!@proxy:3128", "HOMEPAGE": "http://example.org/@someone"}
    redactor = Redactor(environ)
    assert redactor.text("via http://me:p%40ssw0rd!@proxy:3128") == "via http://me:***@proxy:3128"
    assert redactor.text("p@ssw0rd!") == "***"


SECRET = 'a"b\\c é%20+&1'
SPELLINGS = [SECRET, json.dumps(SECRET), json.dumps(SECRET, ensure_ascii=False), repr(SECRET), quote(SECRET, safe="")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_secret_is_found_however_it_is_spelled(spelling: str) -> None:
    hidden = Redactor({"A_KEY": SECRET}).text(f"<{spelling}>")
    assert "***" in hidden
    assert SECRET[-4:] not in hidden


def test_a_private_key_is_found_line_by_line_and_squeezed() -> None:
    key = "-----BEGIN KEY-----\nabcdefghijkl\nmnopqrstuvwx\n-----END KEY-----"
    redactor = Redactor({"DEPLOY_KEY": key})
    assert redactor.text(" ".join(key.split())) == "***"
    assert redactor.text("line abcdefghijkl\nmnopqrstuvwx") == "line ***\n***"


def test_the_longest_secret_wins_and_later_ones_count() -> None:
    environ = {"A_KEY": "abcdefgh", "B_KEY": "abcdefghijkl"}
    redactor = Redactor(environ)
    assert redactor.text("abcdefghijkl") == "***"
    environ["C_KEY"] = "set-later"
    assert redactor.value({"x": ["set-later", 1, None, True]}) == {"x": ["***", 1, None, True]}


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
    ("password", "", False),
]


@pytest.mark.parametrize(("name", "value", "is_secret"), CARRIED, ids=[f"{n}={v}" for n, v, _ in CARRIED])
def test_what_a_job_may_not_carry(name: str, value: str, is_secret: bool) -> None:
    why = carried_secret(name, value, {"SOME_TOKEN": "ENVIRONS-OWN-SECRET"})
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
    assert blank_out(log, ["abcdefgh", "nowhere!"]) == 2
    assert log.read_bytes() == b"\xff******** ********abcdefg \n"
    log.write_bytes(b"")
    assert blank_out(log, ["abcdefgh"]) == 0


def test_redirected_output_of_a_process_keeps_odd_letters_and_no_secrets(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from phalanx.core.logs import redirect_output;"
        "from phalanx.core.secrets import Redactor;"
        "redirect_output(Path('logs/x.log'), Redactor(os.environ));"
        "print('é \\udcff', os.environ['A_TOKEN']); print('end', end=''); print(1 / 0)"
    )
    environ = {"A_TOKEN": "abcdefgh", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"", b"")
    log = (tmp_path / "logs" / "x.log").read_text(encoding="utf-8")
    assert log.startswith("é \\udcff ***\n")
    assert "ZeroDivisionError" in log
    assert log.endswith("end")
