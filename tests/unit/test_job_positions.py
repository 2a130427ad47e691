"""Each table, key, value and array element of a TOML text has its line and column."""

from __future__ import annotations

import tomllib

from phalanx.job.positions import locate_toml_keys

TEXT = """\
top.a = 1
"quo\\u00e9ted key" = { x = 1, y.z = "a" } # comment
list = [1, # one
  "ü", [2, {q = 'w'}]]
[a.b]
c = 1
[[d.s]]
w = 1
[[d.s]]
w = 2
[d.s.sub]
v = 3
[[d.s]]"""


def test_every_kind_of_place():
    places = locate_toml_keys(TEXT)
    spots = {path: (*place.key, *place.value) for path, place in places.items()}
    assert spots == {
        ("top",): (1, 1, 1, 9),
        ("top", "a"): (1, 5, 1, 9),
        ("quoéted key",): (2, 1, 2, 22),
        ("quoéted key", "x"): (2, 24, 2, 28),
        ("quoéted key", "y"): (2, 31, 2, 37),
        ("quoéted key", "y", "z"): (2, 33, 2, 37),
        ("list",): (3, 1, 3, 8),
        ("list", 0): (3, 9, 3, 9),
        ("list", 1): (4, 3, 4, 3),
        ("list", 2): (4, 8, 4, 8),
        ("list", 2, 0): (4, 9, 4, 9),
        ("list", 2, 1): (4, 12, 4, 12),
        ("list", 2, 1, "q"): (4, 13, 4, 17),
        ("a",): (5, 2, 5, 2),
        ("a", "b"): (5, 4, 5, 4),
        ("a", "b", "c"): (6, 1, 6, 5),
        ("d",): (7, 3, 7, 3),
        ("d", "s"): (7, 5, 7, 5),
        ("d", "s", 0): (7, 5, 7, 5),
        ("d", "s", 0, "w"): (8, 1, 8, 5),
        ("d", "s", 1): (9, 5, 9, 5),
        ("d", "s", 1, "w"): (10, 1, 10, 5),
        ("d", "s", 1, "sub"): (11, 6, 11, 6),
        ("d", "s", 1, "sub", "v"): (12, 1, 12, 5),
        ("d", "s", 2): (13, 5, 13, 5),
    }


def test_the_same_paths_as_the_parsers():
    def paths(value, path=()):
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        for key, item in items:
            yield (*path, key)
            yield from paths(item, (*path, key))

    assert set(paths(tomllib.loads(TEXT))) == set(locate_toml_keys(TEXT))
