"""The wall clock of a run's processes, and of no others, a step away from the machine's.

A small library in C that these processes load first adds to what they ask for the time. The
monotonic clock, which nobody can step, and the times of files, which the kernel writes, are left
alone.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.files import create_regular_file
from phalanx.resilience.clock_step import CLOCK_VARIABLE, SECONDS

_SOURCE = r"""
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


@dataclass(frozen=True)
class SteppedClock:
    """The library, and the file that says how far the clock is away."""

    library: Path
    clock: Path

    @staticmethod
    def build(folder: Path) -> SteppedClock:
        """Compile the library into `folder`; the clock is that of the machine. Raises
        EnvironmentProblem without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise EnvironmentProblem("there is no C compiler (cc), and a stepped clock needs one")
        stepped = SteppedClock(folder / "clock.so", folder / "clock")
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(stepped.library), "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True, capture_output=True)
        with create_regular_file(stepped.clock) as file:
            file.write(SECONDS.pack(0))
        return stepped

    @property
    def environment(self) -> dict[str, str]:
        """The variables of processes that have this clock."""
        return {"LD_PRELOAD": str(self.library), CLOCK_VARIABLE: str(self.clock)}

    def step_to(self, seconds: float) -> None:
        """Let the clock be so many seconds away from the machine's, from now on."""
        step_clock(self.clock, seconds)


def step_clock(clock: Path, seconds: float) -> None:
    """Write the seconds into a clock's file, which the processes have mapped."""
    # In place: another file under the name would not be theirs.
    with open(clock, "r+b") as file:
        file.write(SECONDS.pack(int(seconds)))
