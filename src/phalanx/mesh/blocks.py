"""Find the repeated blocks of any module: what is sharded, recomputed and compiled as one unit."""

from __future__ import annotations

import fnmatch

from torch import nn

from phalanx.mesh.logical import full_name

# Attribute of a module: names of its parts that a pipeline's last stage holds, too.
LAST_STAGE_ATTRIBUTE = "last_stage"


def list_last_stage_module_names(module: nn.Module) -> tuple[str, ...]:
    """The names in `module.last_stage`, one or several; none if that attribute is anything else
    (a layer, say)."""
    attribute = getattr(module, LAST_STAGE_ATTRIBUTE, ())
    if isinstance(attribute, str):
        return (attribute,)
    if isinstance(attribute, list | tuple) and all(isinstance(name, str) for name in attribute):
        return tuple(attribute)
    return ()


def find_repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: what `module.block_pattern` names, else its first ModuleList or
    Sequential of one class."""
    pattern = getattr(module, "block_pattern", None)
    if isinstance(pattern, str):
        blocks = []
        for raw_name, part in module.named_modules():
            name = full_name(raw_name)
            # fnmatch's `*` also matches dots: "layers.*" would take parts of blocks as well.
            is_as_deep = name.count(".") == pattern.count(".")
            if is_as_deep and fnmatch.fnmatchcase(name, pattern):
                blocks.append(part)
        return blocks
    for part in module.modules():
        is_list = isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
        if is_list and len({type(item) for item in part}) == 1:
            # One block may stand in several places.
            return list(dict.fromkeys(part))
    return []
