"""Gloo's worker threads break the heap over the name of their last work.

python examples/found/by_chance/gloo_race.py                   (some of eight processes are killed)
python examples/found/by_chance/gloo_race.py --short-name      (none is)

A race: it takes minutes on a busy machine, and a run in which nobody is killed proves nothing.
"""

import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist

NUM_PROCESSES, ROUNDS, UNDER_WAY = 8, 2000, 64


# [reproduction]
def gather_often(store: str, has_short_name: bool) -> None:
    """Gathers of a group of one rank, 64 of them under way together: both threads of gloo end one
    at about the same time, and write down its name."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    operations, group, x = torch.ops._c10d_functional, dist.group.WORLD.group_name, torch.ones(8)
    for _ in range(ROUNDS):
        started = []
        for _ in range(UNDER_WAY):
            if has_short_name:  # ALLGATHER
                out = torch.empty(8)
                started.append(operations.all_gather_into_tensor_out(x, 1, group, out=out))
            else:  # ALLGATHER_COALESCED
                started.append(operations.all_gather_into_tensor(x, 1, group))
        for tensor in started:
            operations.wait_tensor(tensor)


# [/reproduction]


def main() -> int:
    has_short_name = "--short-name" in sys.argv[1:]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        processes = []
        for number in range(NUM_PROCESSES):
            arguments = (f"{directory}/store-{number}", has_short_name)
            processes.append(context.Process(target=gather_often, args=arguments))
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    signals = [-process.exitcode for process in processes if (process.exitcode or 0) < 0]
    print(f"torch {torch.__version__}: {len(signals)} of {NUM_PROCESSES} killed, by {signals}")
    return int(bool(signals))


if __name__ == "__main__":
    sys.exit(main())
