"""Reads a checkpoint of phalanx without phalanx: `python read_checkpoint.py RUN/checkpoints/step-N`
lists its tensors.

Needs numpy and xxhash. docs/checkpoint-format.md says what is read here. ValueError for what is not
as it was written.
"""

import json
import sys
from pathlib import Path

import numpy as np
import xxhash

BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}  # types that numpy has not


def read_manifest(directory: Path) -> dict:
    written = (directory / "manifest.json").read_bytes()
    body = json.loads(written)
    way = (
        json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    )  # so that every byte is under it
    signed = {key: value for key, value in body.items() if key != "xxh3"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    if (
        written != way.encode()
        or body["format"] != 2
        or xxhash.xxh3_64_hexdigest(text.encode()) != body["xxh3"]
    ):
        raise ValueError(f"{directory}: the manifest is not what was written")
    return body


def check_files(directory: Path, manifest: dict) -> None:
    there = {path.name for path in directory.iterdir()} - {"manifest.json"}
    if there != set(manifest["files"]):
        raise ValueError(
            f"{directory}: missing or foreign files: {sorted(there ^ set(manifest['files']))}"
        )
    for name, stored in manifest["files"].items():
        digests = []
        with open(directory / name, "rb") as file:
            while chunk := file.read(manifest["chunk_bytes"]):
                digests.append(xxhash.xxh3_64_hexdigest(chunk))
            if file.tell() != stored["num_bytes"] or "".join(digests) != stored["chunks_xxh3"]:
                raise ValueError(f"{directory / name}: its bytes are not those that were written")


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor by name, in the full model's shape; types that numpy has not come as their
    bits."""
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    tensors = {}
    for name, stored in manifest["tensors"].items():
        whole = np.empty(stored["shape"], BITS.get(stored["dtype"], stored["dtype"]))
        for piece in stored["pieces"]:
            place = tuple(
                slice(o, o + n) for o, n in zip(piece["offset"], piece["size"], strict=True)
            )
            whole[place] = read_piece(directory / piece["file"], piece["key"], whole.dtype)
        tensors[name] = whole
    for name, stored_as in manifest["aliases"].items():  # tied tensors are stored once
        tensors[name] = tensors[stored_as]
    return tensors


def read_piece(path: Path, key: str, dtype: np.dtype) -> np.ndarray:
    with open(
        path, "rb"
    ) as file:  # the header by hand, for the types that safetensors' numpy side has not
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        base = file.tell()
    begin, end = header[key]["data_offsets"]
    return np.fromfile(path, dtype, (end - begin) // dtype.itemsize, offset=base + begin).reshape(
        header[key]["shape"]
    )


if __name__ == "__main__":
    for name, tensor in sorted(read_tensors(Path(sys.argv[1])).items()):
        print(
            f"{name:60} {tensor.dtype} {list(tensor.shape)}"
            f" {xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tensor))}"
        )
