"""A rank as a launcher's variables describe it, and how such variables are read: a text that is no
number, or half a description, is refused by the variable's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.core.errors import EnvironmentProblem

# Below the ports that a kernel gives away by itself (32768 on Linux).
FIRST_PORT, NUM_PORTS = 12_000, 20_000


@dataclass(frozen=True)
class LauncherRank:
    """One rank of a launcher's.

    `origin` is its name, `words` what a person is told of all its ranks.
    """

    origin: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    words: str
    attempt: int = 0

    def build_torch_variables(self) -> dict[str, str]:
        """The same rank in the variables that torch reads."""
        variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
        if self.attempt:
            variables["PHALANX_ATTEMPT"] = str(self.attempt)
        return variables


def read_integer_variable(environ: Mapping[str, str], name: str) -> int | None:
    """The integer in variable `name`, None where it is unset or empty.

    Raises EnvironmentProblem for another text.
    """
    text = get_stripped_variable(environ, name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise EnvironmentProblem(f"{name} is {text[:80]!r}, which is not an integer") from None


def require_rank_within_size(name: str, value: int, size_name: str, size: int) -> None:
    """Raise EnvironmentProblem unless `value` is one of the `size` numbers from 0."""
    if not 0 <= value < size:
        raise EnvironmentProblem(
            f"{name} is {value} and {size_name} is {size}", fix=f"{name} counts from 0"
        )


def read_port_variable(environ: Mapping[str, str], name: str) -> int | None:
    """The port in variable `name`. Raises EnvironmentProblem for a number that is none."""
    port = read_integer_variable(environ, name)
    if port is not None and not 0 < port < 65_536:
        raise EnvironmentProblem(
            f"{name} is {port}, which is not a port", fix="ports are 1 to 65535"
        )
    return port


def read_integer_variable_pair(
    environ: Mapping[str, str], first: str, second: str
) -> tuple[int, int] | None:
    """The integers of two variables, None if neither is set.

    Raises EnvironmentProblem where one of them is missing.
    """
    values = read_integer_variable(environ, first), read_integer_variable(environ, second)
    present, absent = first, second
    if values[0] is None:
        present, absent = second, first
    if values[0] is not None and values[1] is not None:
        return values[0], values[1]
    if values == (None, None):
        return None
    raise EnvironmentProblem(
        f"{present} is set and {absent} is not", fix=f"set {absent}, or unset {present}"
    )


def require_integer_variable(environ: Mapping[str, str], name: str, why: str) -> int:
    value = read_integer_variable(environ, name)
    if value is None:
        raise EnvironmentProblem(
            f"{why} and {name} is not set",
            fix=(
                "let the launcher set it, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT on every rank"
            ),
        )
    return value


def find_first_set_variable(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The first of the variables `names` that is set to a text, or "" if none is."""
    for name in names:
        if get_stripped_variable(environ, name):
            return name
    return ""


def get_stripped_variable(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()
