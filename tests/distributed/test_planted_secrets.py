"""A run whose user code lets secrets out in every way: no file of its directory holds one, nor
does its output."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from commands import TINY, environment, run

SECRET = "sk-Ab3dEf9hIjKlMnOpQr5tUvWxYz012345"
PASSWORD = "pw-of-the-proxy-77"
CODE = """
import base64, json, os, sys, warnings
from torch import nn

SECRET = os.environ["AN_API_KEY"]


class Leaky(nn.Module):
    def __init__(self, vocab_size=257, dim=16):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size), 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls == 3:
            encoded = base64.b64encode(f"user:{SECRET}".encode()).decode()
            ways = [
                SECRET, encoded, SECRET.encode().hex(), SECRET[:17], SECRET[-15:], repr(SECRET.encode()),
                json.dumps({"k": SECRET}), os.environ["HTTPS_PROXY"], SECRET[:14] + "\\n   " + SECRET[14:],
                base64.encodebytes(b"x" * 50 + SECRET.encode()).decode(),
            ]
            for way in ways:
                print("printed", way)
                print("printed", way, file=sys.stderr)
                os.write(2, f"written {way}\\n".encode())
            warnings.warn(f"warned {ways}")
            raise ValueError(f"failed with {' and '.join(ways)}")
        return self.head(self.embed(tokens))
"""


def pieces_in(content: bytes) -> list[str]:
    """What of the secrets stands in `content`, in any way that somebody could read."""
    plain, encoded = SECRET.encode(), base64.b64encode(SECRET.encode())
    shifted = base64.b64encode(b"user:" + plain)[8:]
    looked_for = [
        text[at : at + 14] for text in (plain, encoded, shifted) for at in range(len(text) - 16)
    ]
    looked_for += [plain.hex().encode()[at : at + 24] for at in range(2 * len(plain) - 24)] + [
        PASSWORD.encode()
    ]
    joined = b"".join(content.split())
    return [piece.decode() for piece in looked_for if piece in content or piece in joined]


def test_no_file_of_a_failing_run_holds_a_secret(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(CODE)
    env = environment(AN_API_KEY=SECRET, HTTPS_PROXY=f"http://me:{PASSWORD}@proxy:3128")
    settings = [word for word in TINY if not word.startswith("model.")]
    own = ["model.kind=leaky:Leaky", "parallel.ranks=1", "resilience.max_restarts=0", "run.dir=run"]
    done = run("train", *settings, *own, cwd=tmp_path, env=env)
    assert done.code == 10, done.err
    assert "failed with" in done.err
    assert "***" in done.err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"report.html", "job.json"} <= {path.name for path in files}
    assert pieces_in((done.out + done.err).encode()) == []
    assert {path.name: found for path in files if (found := pieces_in(path.read_bytes()))} == {}


@pytest.mark.parametrize("key", ["run.dir", "data.source", "model.args"])
def test_a_job_that_carries_one_is_refused(tmp_path: Path, key: str) -> None:
    value = base64.b64encode(SECRET.encode()).decode()
    words = f'model.args={{"note"="{value}"}}' if key == "model.args" else f"{key}={value}"
    done = run("plan", words, cwd=tmp_path, env=environment(AN_API_KEY=SECRET))
    assert done.code == 3
    assert pieces_in((done.out + done.err).encode()) == []
