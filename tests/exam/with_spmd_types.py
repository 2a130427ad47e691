"""`python -m exam.with_spmd_types`: which plants the numerical check of spmd_types finds.

Needs `pip install spmd_types==0.3.1`, which nothing else of phalanx does. Its `rulecheck` runs an
autograd function on ranks that it simulates in one process, and compares what comes out with the
type that a hook states. Hooks are written here for the operations of tensor parallelism
(`mesh/tensor_group.py`), the only collectives of phalanx that are such functions of one tensor;
each plant in that file is tried, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exam.curves import TESTS
from exam.plant import list_plants
from exam.sit import write_edits

FILE = "mesh/tensor_group.py"


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(check_operations())
    num_found = 0
    plants = [plant for plant in list_plants() if any(e.file == FILE for e in plant.edits)]
    for plant in plants:
        with tempfile.TemporaryDirectory() as directory:
            environment = write_edits(plant, Path(directory))
            environment["PYTHONPATH"] += f":{TESTS}"
            command = [sys.executable, "-m", "exam.with_spmd_types", "--check"]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            has_run = any(Path(directory, "ran").iterdir())
        if done.returncode not in (0, 1):
            sys.exit(done.stderr)
        num_found += done.returncode
        words = "found" if done.returncode else "not found" if has_run else "its lines did not run"
        print(f"{plant.name}: {words}")
    print(f"{num_found} of {len(plants)} found")


def check_operations() -> int:
    """1 if an operation computes something else than its type says, else 0."""
    # On CPUs of torch 2.13 normal numbers of torch.func raise; without them another way is taken.
    sys.modules["torch.func._random"] = None  # type: ignore[assignment]
    import torch
    import torch.distributed as dist
    from spmd_types import rules
    from spmd_types.rulecheck import RuleCheckError, rulecheck
    from spmd_types.types import P, R, S

    from phalanx.core.phases import PhaseTimer
    from phalanx.mesh.tensor_group import TensorParallelGroup

    def make(group: Any, num_tokens: int, *, cuts_sequence: bool) -> TensorParallelGroup:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return TensorParallelGroup(
            group.group_name,
            rank,
            size,
            PhaseTimer(),
            cuts_sequence=cuts_sequence,
            num_tokens=num_tokens,
        )

    def leave(x: Any, group: Any) -> Any:
        return make(group, x.shape[1], cuts_sequence=False).leave(x)

    def leave_cut(x: Any, group: Any) -> Any:
        return make(group, x.shape[1], cuts_sequence=True).leave(x)

    def enter(x: Any, group: Any) -> Any:
        return make(group, x.shape[1], cuts_sequence=False).enter(x)

    def enter_cut(x: Any, group: Any) -> Any:
        num_tokens = x.shape[1] * dist.get_world_size(group)
        return make(group, num_tokens, cuts_sequence=True).enter(x)

    def select_tokens_of_rank(x: Any, group: Any) -> Any:
        return make(group, x.shape[1], cuts_sequence=True).select_tokens_of_rank(x).clone()

    cases: list[tuple[Callable[..., Any], Any, Callable[..., Any]]] = [
        (leave, P, lambda x, group: rules.all_reduce(x, group, src=P, dst=R)),
        (leave_cut, P, lambda x, group: rules.reduce_scatter(x, group, src=P, dst=S(1))),
        (enter, R, lambda x, group: rules.ignore(x) or x),
        (enter_cut, S(1), lambda x, group: rules.all_gather(x, group, src=S(1), dst=R)),
        (select_tokens_of_rank, R, lambda x, group: rules.convert(x, group, src=R, dst=S(1))),
    ]
    is_wrong = False
    for operation, placement, hook in cases:
        function = make_function(torch, operation, hook)
        try:
            rulecheck(
                function,
                (torch.randn(4, 8, 6, dtype=torch.float64), "tp"),
                placements={"x": {"tp": placement}},
                mesh={"tp": 4},
                local_tensor_mode=True,
            )
        except RuleCheckError as error:
            print(f"{operation.__name__}: {error}", file=sys.stderr)
            is_wrong = True
    return int(is_wrong)


def make_function(torch: Any, operation: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """An autograd function whose forward is `operation`, and whose types are those of `hook`."""

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, group: Any) -> Any:
            return operation(x, group)

        @staticmethod
        def spmd_typecheck(*, x: Any, group: Any) -> Any:
            return hook(x, group)

    return Function


if __name__ == "__main__":
    main()
