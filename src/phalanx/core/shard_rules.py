"""`@phalanx.shard_rules({...})`: a user's module brings its own rules for tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

SHARD_RULES_ATTRIBUTE = "shard_rules"  # of a module: pattern -> rule
ModuleFactory = TypeVar("ModuleFactory", bound=Callable[..., Any])


def shard_rules(rules: Mapping[str, str]) -> Callable[[ModuleFactory], ModuleFactory]:
    """Decorate a module's class, or the factory that builds one, with the rules by which tensor
    parallelism cuts it.

    `rules` are those of `[parallel.rules]` in a job: names of modules, as patterns, to kinds of
    cuts. What a job says of the same pattern wins, and so do the rules that an object has set
    itself in `shard_rules`.

        @phalanx.shard_rules({"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"})
        class Model(nn.Module): ...
    """
    written = dict(rules)

    def decorate(factory: ModuleFactory) -> ModuleFactory:
        if isinstance(factory, type):
            setattr(
                factory,
                SHARD_RULES_ATTRIBUTE,
                {**getattr(factory, SHARD_RULES_ATTRIBUTE, {}), **written},
            )
            return factory

        @functools.wraps(factory)
        def build(*args: Any, **kwargs: Any) -> Any:
            module = factory(*args, **kwargs)
            setattr(
                module,
                SHARD_RULES_ATTRIBUTE,
                {**written, **(getattr(module, SHARD_RULES_ATTRIBUTE, None) or {})},
            )
            return module

        return build  # type: ignore[return-value]

    return decorate
