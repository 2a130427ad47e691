"""A disk that fails, or is slow, for a run's processes and for no others.

A small library in C that these processes load first stands before write(2), fsync(2) and their
kin. It does nothing until a fault writes into its control file.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import EnvironmentProblem
from phalanx.resilience.failing_disk import (
    FAILING_DISK_VARIABLE,
    MAX_PATH_BYTES,
    create_control_file,
)

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control { long error; long delay_ms; char below[MAX_PATH_BYTES]; };

static const volatile struct control *get_control(void) {
    static const volatile struct control *shared = NULL;
    if (shared == NULL) {
        int file = open(getenv("FAILING_DISK"), O_RDONLY | O_CLOEXEC);
        shared = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return shared;
}

/* 1, and errno is set, if a call on this file fails. */
static int fails(int file) {
    const volatile struct control *control = get_control();
    long error = control->error, delay_ms = control->delay_ms;
    if (error == 0 && delay_ms == 0) return 0;
    char link[64], path[PATH_MAX + 1];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX);
    const char *below = (const char *)control->below;
    size_t prefix = strlen(below);
    if (length < 0 || prefix == 0 || strncmp(path, below, prefix) != 0) return 0;
    path[length] = 0;
    if (path[prefix] != 0 && path[prefix] != '/') return 0;
    struct timespec delay = {delay_ms / 1000, delay_ms % 1000 * 1000000};
    if (delay_ms != 0) nanosleep(&delay, NULL);
    errno = error;
    return error != 0;
}

#define STAND_BEFORE(type, name, parameters, arguments)               \
    type name parameters {                                            \
        static type (*real) parameters = NULL;                        \
        if (real == NULL) real = (type (*) parameters)dlsym(RTLD_NEXT, #name); \
        return fails(file) ? -1 : real arguments;                     \
    }

STAND_BEFORE(ssize_t, write, (int file, const void *data, size_t n), (file, data, n))
STAND_BEFORE(ssize_t, pwrite, (int file, const void *data, size_t n, off_t at), (file, data, n, at))
STAND_BEFORE(ssize_t, pwrite64, (int file, const void *data, size_t n, off64_t at),
             (file, data, n, at))
STAND_BEFORE(ssize_t, writev, (int file, const struct iovec *data, int n), (file, data, n))
STAND_BEFORE(int, fsync, (int file), (file))
STAND_BEFORE(int, fdatasync, (int file), (file))
"""


@dataclass(frozen=True)
class FailingDisk:
    """The library, and the file by which faults control it."""

    library: Path
    control: Path

    @staticmethod
    def build(folder: Path) -> FailingDisk:
        """Compile the library into `folder`; nothing fails yet. Raises EnvironmentProblem without
        a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise EnvironmentProblem("there is no C compiler (cc), and a failing disk needs one")
        disk = FailingDisk(folder / "failing_disk.so", folder / "failing_disk")
        flags = ["-shared", "-fPIC", f"-DMAX_PATH_BYTES={MAX_PATH_BYTES}", "-x", "c", "-"]
        command = [compiler, *flags, "-o", str(disk.library), "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True, capture_output=True)
        create_control_file(disk.control)
        return disk

    @property
    def environment(self) -> dict[str, str]:
        """The variables of processes that have this disk."""
        return {"LD_PRELOAD": str(self.library), FAILING_DISK_VARIABLE: str(self.control)}
