"""Who takes part in a comparison: ranks that never talk, torch's own, libraries that are installed,
and phalanx in layouts.

Torch-free: libraries are looked for, and not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from phalanx.core.errors import UsageError, format_nearest_word_hint
from phalanx.core.typed_json import JsonRecord

LOOPS_PACKAGE = "phalanx.bench.training.loops"
NEVER_TALK = "never talk"


@dataclass(frozen=True)
class Contender(JsonRecord):
    """One way to train. `loop` is a module of LOOPS_PACKAGE; `variant` tells apart what a loop can
    do in several ways: phalanx's layouts, and stages of ZeRO."""

    name: str
    loop: str
    variant: str = ""
    distribution: str = "torch"
    """The package on the index whose version is said."""

    @property
    def is_alone(self) -> bool:
        """True for ranks that never talk: each trains a copy of its own, and its losses are its
        own after the first step."""
        return self.name == NEVER_TALK

    def find_version(self) -> str:
        """The version of the library, empty where its package says none."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""


@dataclass(frozen=True)
class Library:
    """A library that may be compared. `module`: what is imported of it; None is torch alone."""

    name: str
    contenders: tuple[Contender, ...]
    module: str | None = None

    @property
    def is_installed(self) -> bool:
        """True if it can be imported, as far as the search path says."""
        return self.module is None or find_spec(self.module) is not None

    @property
    def distribution(self) -> str:
        return self.contenders[0].distribution


ALONE = Contender(NEVER_TALK, "never_talk")
LIBRARIES = {
    library.name: library
    for library in (
        Library("ddp", (Contender("torch ddp", "torch_ddp"),)),
        Library("fsdp2", (Contender("torch fsdp2", "torch_fsdp2"),)),
        Library(
            "accelerate",
            (Contender("accelerate ddp", "accelerate_ddp", distribution="accelerate"),),
            "accelerate",
        ),
        Library(
            "fabric",
            (Contender("fabric ddp", "fabric_ddp", distribution="lightning-fabric"),),
            "lightning_fabric",
        ),
        Library(
            "deepspeed",
            tuple(
                Contender(f"deepspeed zero{stage}", "deepspeed_zero", str(stage), "deepspeed")
                for stage in (1, 2, 3)
            ),
            "deepspeed",
        ),
    )
}


def list_libraries(requested: str) -> tuple[list[Library], list[Library]]:
    """(the libraries of `--with`, those that "all" would have and that are not installed).

    Raises UsageError for a name that is none, and for a named one that is not installed.
    """
    names = [name.strip() for name in requested.split(",")]
    if names == ["all"]:
        libraries = list(LIBRARIES.values())
        installed = [library for library in libraries if library.is_installed]
        return installed, [library for library in libraries if not library.is_installed]
    if names == ["none"]:
        return [], []
    for name in names:
        if name not in LIBRARIES:
            hint = format_nearest_word_hint(name, list(LIBRARIES))
            raise UsageError(
                f"--with: no {name!r}", fix=hint or f"all, none, or some of {', '.join(LIBRARIES)}"
            )
        if not LIBRARIES[name].is_installed:
            distribution = LIBRARIES[name].distribution
            raise UsageError(
                f"--with: {name} is not installed here", fix=f"pip install {distribution}"
            )
    return [LIBRARIES[name] for name in dict.fromkeys(names)], []


def list_phalanx_contenders(layouts: Sequence[str]) -> list[Contender]:
    """phalanx in each of `layouts`, by their names."""
    return [
        Contender(f"phalanx {layout}", "phalanx_layout", layout, "phalanx") for layout in layouts
    ]
