"""python3 benchmarks/gpu_check [--help]: no installation and no virtual environment; torch must
be importable."""

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parent.parent
)  # of the package, not its inside: names stay its own

from gpu_check.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
