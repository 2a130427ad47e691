"""The wall clock of every process of a run is stepped by a day and back by an hour: nothing of
the run notices."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from commands import COLD, TINY, environment, events, loss_curve, run, start, watching, write_text
from phalanx.observe.events import RestartScheduled, StepFinished

# What every process of the run asks for the time. The monotonic clock, which nobody can step, is
# left alone.
STEPPED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static time_t step(void) {
    static const volatile long *shared = NULL;
    if (shared == NULL) {
        int file = open(getenv("CLOCK_STEP"), O_RDONLY);
        shared = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    }
    return *shared;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *) = NULL;
    if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += step();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    int code = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return code;
}

time_t time(time_t *now) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now != NULL) *now = fine.tv_sec;
    return fine.tv_sec;
}
"""
JOB = (
    *TINY,
    "data.source=text",
    "parallel.ranks=2",
    "train.steps=90",
    "checkpoint.every_steps=15",
    "run.dir=run",
)
DAY_S = 86400.0


@pytest.mark.long
def test_a_run_whose_clocks_are_stepped_ends_as_any_other(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(
            "needs a C compiler, for what steps the clocks of the run's processes and of no others"
        )
    library, clock = tmp_path / "clock.so", tmp_path / "clock"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=STEPPED_CLOCK, text=True, check=True)
    write_text(tmp_path / "text")

    def step_to(seconds: float) -> None:
        clock.touch()
        with open(clock, "r+b") as file:
            file.write(struct.pack("l", int(seconds)))

    step_to(0)
    env = environment(LD_PRELOAD=str(library), CLOCK_STEP=str(clock))
    job = (*JOB, 'resilience.inject=["kill:rank=1,step=50"]', "observe.log_every=5")
    with watching(start("train", *job, cwd=tmp_path, env=env, command=COLD)) as watched:
        watched.wait_for("step 10/")
        step_to(DAY_S)
        watched.wait_for("step 35/")
        step_to(-3600)  # rank 1 is killed at an earlier time than most of the run was
        watched.wait_for("step 65/")
        step_to(4 * DAY_S)
        done = watched.finish()
    assert done.code == 0, done.err
    assert re.search(r"^saved +.*step-90", done.out, re.MULTILINE), done.out
    run_dir = tmp_path / "run"
    assert [
        e.event.from_step
        for e in events(run_dir, RestartScheduled)
        if isinstance(e.event, RestartScheduled)
    ] == [45]
    steps = [e.time_unix_s for e in events(run_dir, StepFinished)]
    assert max(steps) - min(steps) > 3 * DAY_S  # the clocks were stepped
    assert list(loss_curve(run_dir)) == list(range(1, 91))
    told = json.loads(run("report", "run", "--json", cwd=tmp_path).out)
    assert told["status"] == "finished"
    assert 0 < told["wall_s"] < done.wall_s + 60
