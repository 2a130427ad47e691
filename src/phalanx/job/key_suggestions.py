"""The key that a wrong name was meant to be: one of our own, or one of another trainer's.

Standard library only, since errors of the command line read it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from phalanx.job.key_aliases import KEYS_OF_ALIAS, KeyAlias

SectionsOfLeafKey = Mapping[str, tuple[str, ...]]
_MIN_SIMILARITY = 0.75  # difflib's ratio from which a name counts as a misspelling of another


def find_similar_keys(word: str, leaves: SectionsOfLeafKey) -> tuple[KeyAlias, ...]:
    """The keys that `word` may mean: those of this name, those that other trainers call so, else
    the nearest of all names.

    `leaves`: the sections of each name of a key ("lr": ("optim",)). The word may have dashes, or a
    section before it.
    """
    # "--learning-rate" and "training.learning_rate" are both "learning_rate".
    name = word.lower().lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in leaves:
        return tuple(KeyAlias(f"{section}.{name}") for section in leaves[name])
    if name in KEYS_OF_ALIAS:
        return (KEYS_OF_ALIAS[name],)
    close = difflib.get_close_matches(name, [*leaves, *KEYS_OF_ALIAS], n=1, cutoff=_MIN_SIMILARITY)
    if not close:
        return ()
    # Once more with a name that is known, so it ends there.
    return find_similar_keys(close[0], leaves)


def suggest_key(word: str, leaves: SectionsOfLeafKey, raw: str = "") -> str:
    """'did you mean "optim.lr=1e-3"?' with what is otherwise about the key; "" if none is near.

    `raw` is the value that was given.
    """
    keys = find_similar_keys(word, leaves)
    if not keys:
        return ""
    # Another trainer's switch may be a number of ours: fsdp=true is no number of shards.
    is_switch = raw.lower() in ("true", "false") and word.lower() not in leaves
    shown = []
    for key in keys:
        setting = key.key
        if raw and key.keeps_value and not is_switch:
            setting += f"={raw}"
        shown.append(f'"{setting}"')
    suggestion = f"did you mean {' or '.join(shown)}?"
    notes = [key.note for key in keys if key.note]
    if notes:
        suggestion += f" ({notes[0]})"
    return suggestion
