"""A real S3 server process (moto's) on loopback, which can be told to fail: `with s3_server() as
server: ...`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests-7f3a9c",
}
BUCKET = "bucket"


@dataclass(frozen=True)
class Server:
    """`env` is what a process needs in its environment to find it, with a bucket that is there."""

    address: str
    env: dict[str, str]

    def fail(self, **fault: Any) -> None:
        """The next `times` requests of `method` whose path contains `part` are answered `delay_s`
        later, and with `status` (and S3's error `code`) if that is given; those that it `holds`
        when it is asked for something else.

        Instead of what was asked for before.
        """
        self._tell(fault)

    def num_failed(self) -> int:
        """How often that happened."""
        return int(self._tell(None))

    def _tell(self, fault: dict[str, Any] | None) -> Any:
        request = urllib.request.Request(
            f"{self.address}/__fault__", json.dumps(fault).encode(), method="POST"
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Start it, with an empty bucket."""
    command = [sys.executable, __file__]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        env = CREDENTIALS | {
            "AWS_ENDPOINT_URL": address,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield Server(address, env)
    finally:
        process.kill()
        process.communicate()


@dataclass
class Fault:
    method: str = ""
    part: str = ""
    times: int = 0
    status: int = 0
    code: str = "InternalError"
    delay_s: float = 0.0
    holds: bool = False
    num_struck: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def strikes(self, environ: dict[str, Any]) -> bool:
        asked = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        if (
            self.num_struck >= self.times
            or environ["REQUEST_METHOD"] != self.method
            or self.part not in asked
        ):
            return False
        self.num_struck += 1
        return True


def serve() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto = DomainDispatcherApplication(create_backend_app)
    faults = [Fault()]

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/__fault__":
            told = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            if told is not None:
                faults[0].is_over.set()
                faults[0] = Fault(**told)
            start_response("200 OK", [])
            return [str(faults[0].num_struck).encode()]
        fault = faults[0]
        if fault.strikes(environ):
            time.sleep(fault.delay_s)
            if fault.holds:
                fault.is_over.wait(60.0)
            if fault.status:
                start_response(f"{fault.status} Injected", [("Content-Type", "application/xml")])
                return [
                    f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode()
                ]
        return moto(environ, start_response)  # type: ignore[no-any-return]

    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    os.environ.update(CREDENTIALS)
    serve()
