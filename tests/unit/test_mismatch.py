"""The table of tensors that do not fit."""

from __future__ import annotations

from phalanx.checkpoint.reading.mismatch import (
    ExpectedShapeAndDtype,
    MismatchError,
    find_tensor_mismatches,
    format_mismatch_table,
)

MODEL = {
    "a": ExpectedShapeAndDtype((2, 3), "float32"),
    "b": ExpectedShapeAndDtype((4,), "float32"),
    "n": ExpectedShapeAndDtype((), "int64"),
}


def test_what_fits_has_no_misfits() -> None:
    assert find_tensor_mismatches(MODEL, dict(MODEL)) == ()
    assert (
        find_tensor_mismatches(
            {"a": ExpectedShapeAndDtype((2, 3))}, {"a": ExpectedShapeAndDtype((2, 3), "bfloat16")}
        )
        == ()
    )


def test_every_way_not_to_fit_is_a_row() -> None:
    there = {
        "a": ExpectedShapeAndDtype((3, 2), "float32"),
        "n": ExpectedShapeAndDtype((), "int32"),
        "x": ExpectedShapeAndDtype((1,), "float32"),
    }
    error = MismatchError(
        "it does not fit", find_tensor_mismatches(MODEL, there), where="step-4", fix="do so"
    )
    assert str(error).splitlines() == [
        (
            "step-4: it does not fit (1 missing, 1 not in this model, 1 of another shape, 1 of"
            " another type); do so"
        ),
        "  tensor  wanted          found",
        "  b       float32 [4]     -",
        "  x       -               float32 [1]",
        "  a       float32 [2, 3]  float32 [3, 2]",
        "  n       int64 []        int32 []",
    ]
    assert error.exit_code == 5
    assert [row["kind"] for row in error.to_json()["tensors"]] == [
        "missing",
        "extra",
        "shape",
        "dtype",
    ]  # type: ignore


def test_a_cast_is_between_floating_point_types_only() -> None:
    half = {name: ExpectedShapeAndDtype(tensor.shape, "bfloat16") for name, tensor in MODEL.items()}
    assert [row.name for row in find_tensor_mismatches(MODEL, half)] == ["a", "b", "n"]
    assert [row.name for row in find_tensor_mismatches(MODEL, half, cast=True)] == ["n"]
    assert [
        row.kind
        for row in find_tensor_mismatches(
            MODEL, {**MODEL, "a": ExpectedShapeAndDtype((2,), "bfloat16")}, cast=True
        )
    ] == ["shape"]


def test_a_long_table_shows_some_of_each_kind_and_counts_the_rest() -> None:
    wanted = {f"w{number:03d}": ExpectedShapeAndDtype((1,), "float32") for number in range(100)}
    there = {f"x{number:03d}": ExpectedShapeAndDtype((1,), "float32") for number in range(50)} | {
        "w000": ExpectedShapeAndDtype((2,), "float32")
    }
    rows = format_mismatch_table(find_tensor_mismatches(wanted, there), limit=6)
    assert [row.split()[0] for row in rows] == [
        "tensor",
        "w001",
        "w002",
        "w003",
        "x000",
        "x001",
        "w000",
        "and",
    ]
    assert rows[-1] == "  and 144 more"
