"""What decides about every byte of a dataset: its inputs, the tokenizer, and how it is cut into
shards. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.digest import digest, find_differing_dotted_keys
from phalanx.data.dataset import DATASET_FORMAT_VERSION, DatasetManifest, TokenizerFacts
from phalanx.data.sources import SourceListing
from phalanx.data.tokenizer import Tokenizer

# What dataset.json says of them, too.
_MANIFEST_OPTION_KEYS = ("tokenizer", "end_of_document", "column", "shard_bytes", "inputs")


@dataclass(frozen=True)
class BuildOptions:
    """The options of one build. `inputs` are facts of each input, as dataset.json lists them."""

    tokenizer: TokenizerFacts
    end_of_document: int | None
    column: str
    shard_bytes: int
    inputs: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """All but the inputs, which may change between two runs of an unfinished build: each
        shard knows what went into it."""
        options = {"format": DATASET_FORMAT_VERSION, **asdict(self)}
        del options["inputs"]
        return options

    def list_differences(self, manifest: DatasetManifest) -> list[str]:
        """The names of the options, inputs included, that a finished dataset was not built with."""
        listed, options = manifest.to_json(), asdict(self)
        return find_differing_dotted_keys(
            _select_options_for_manifest(listed), _select_options_for_manifest(options)
        )


def _select_options_for_manifest(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in _MANIFEST_OPTION_KEYS}


def collect_build_options(
    sources: Sequence[SourceListing], encoder: Tokenizer, column: str, shard_bytes: int
) -> BuildOptions:
    """The options of a build of `sources` by the tokenizer `encoder`."""
    return BuildOptions(
        tokenizer=TokenizerFacts(encoder.kind, encoder.digest),
        end_of_document=encoder.end_of_document,
        column=column,
        shard_bytes=shard_bytes,
        inputs=tuple(map(_collect_input_facts, sources)),
    )


def _collect_input_facts(listing: SourceListing) -> dict[str, Any]:
    return {
        "source": listing.source,
        "num_files": len(listing.files),
        "num_bytes": sum(file.num_bytes for file in listing.files),
        "digest": digest([[file.name, file.num_bytes] for file in listing.files]),
    }
