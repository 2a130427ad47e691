"""What runs in a system's own process: python child.py SYSTEM CASE FOUND.

Facts are lines of JSON, as they come.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from gpu_check.cases import Case  # noqa: E402
from gpu_check.children import FAILED, MEASURED, MISSING, REFUSED  # noqa: E402

OWN = ("phalanx", "gpu_check")


def main(module: str, case: Case, path: Path) -> int:
    with open(path, "w", buffering=1) as file:

        def say(facts: dict[str, Any]) -> None:
            file.write(json.dumps(facts) + "\n")

        try:
            importlib.import_module(module).measure(case, say)
        except Exception as error:
            traceback.print_exc()
            say({"end": ending(error)})
            return 1
        say({"end": {"status": MEASURED, "why": ""}})
    return 0


def ending(error: Exception) -> dict[str, str]:
    """A missing package is no failure, and neither is what phalanx refuses in a line of its own."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in OWN:
        return {"status": MISSING, "why": error.name or str(error)}
    if hasattr(error, "exit_code"):
        return {"status": REFUSED, "why": str(error)}
    lines = str(error).strip().splitlines()
    return {"status": FAILED, "why": f"{type(error).__name__}: {lines[-1] if lines else ''}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Case.from_json(sys.argv[2]), Path(sys.argv[3])))
