"""`python -m phalanx` and the `phalanx` command."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    if sys.platform == "win32":
        print("phalanx: Windows is not supported; use WSL or Linux", file=sys.stderr)
        sys.exit(6)
    try:
        from phalanx.core.garbage import pausing_garbage_collection

        with pausing_garbage_collection():
            from phalanx.cli._app import run_command_line
    except KeyboardInterrupt:
        sys.exit(130)  # as later, and without a traceback
    from phalanx.core.output import open_closed_standard_streams
    from phalanx.core.terminal import filter_standard_streams

    open_closed_standard_streams()
    filter_standard_streams()  # to the very end: what is printed while the interpreter leaves, too
    code = run_command_line(sys.argv[1:])
    if "torch" in sys.modules:  # a rank of another launcher; no other command imports torch
        from phalanx.launch.rank import exit_rank_without_teardown

        exit_rank_without_teardown(code)
    # The interpreter would look for cycles in all modules once more, to free what ends with it:
    # a tenth of a second.
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
