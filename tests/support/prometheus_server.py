"""A real Prometheus (Debian's package) that scrapes what a test serves, and answers queries."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commands import wait_until
from ports import free_port

PROGRAM = shutil.which("prometheus")
MISSING = "prometheus is not installed (Debian's package prometheus)"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: phalanx
    file_sd_configs: [{{files: [{target}], refresh_interval: 1s}}]
"""


class PrometheusServer:
    """The API of a server that runs."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The data that the API gives; an error of a query raises."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{query}", timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def samples(self, query: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        parameters = {"query": query} | ({} if at_s is None else {"time": repr(at_s)})
        result = self.get("query", **parameters)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def times(self, query: str) -> list[float]:
        """The times at which a series was scraped within the last hour."""
        result = self.get("query", query=f"{query}[1h]")["result"]
        return sorted(float(when) for series in result for when, _ in series["values"])

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.address}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def running_prometheus(folder: Path, target_file: Path, rules: Path) -> Iterator[PrometheusServer]:
    """A server that scrapes, once a second, what `target_file` names as soon as it is there."""
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(CONFIG.format(rules=rules, target=target_file))
    port = free_port()
    command = [
        str(PROGRAM),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = PrometheusServer(port)
    try:
        wait_until(server.is_ready)
        yield server
    finally:
        process.kill()
        process.wait()
