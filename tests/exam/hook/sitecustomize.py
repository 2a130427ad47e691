"""Imported by every process of an exam: edits modules of phalanx as they are imported.

EXAM_EDITS names a JSON file: {module: its edited source, ...}, and EXAM_RAN a folder in which a
file for each module tells that one of its edited lines ran, and MODULE.acted that its bug did.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys


class _EditedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from another text than that of its file."""

    def __init__(self, name, path, text):
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname):
        return compile(self._text, self.path, "exec")

    def exec_module(self, module):
        module.__planted__ = _make_mark(os.path.join(os.environ["EXAM_RAN"], module.__name__))
        super().exec_module(module)


def _make_mark(path):
    noted = set()

    def note(name):
        if name not in noted:
            noted.add(name)
            with open(name, "a"):
                pass

    def mark(condition=True, *, rank=None):
        """True where the bug acts: where `condition` holds, on `rank` (None: on all)."""
        note(path)
        acts = bool(condition) and rank in (None, _read_rank())
        if acts:
            note(path + ".acted")
        return acts

    return mark


def _read_rank():
    """The rank of this process among all, or -1 before there are any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return -1
    return distributed.get_rank()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, texts):
        self._texts = texts

    def find_spec(self, fullname, path, target=None):
        text = self._texts.get(fullname)
        if text is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        spec.loader = _EditedLoader(fullname, spec.origin, text)
        return spec


if "EXAM_EDITS" in os.environ:
    with open(os.environ["EXAM_EDITS"], encoding="utf-8") as file:
        sys.meta_path.insert(0, _Finder(json.load(file)))
