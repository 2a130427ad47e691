"""The one rank that looks at a module: it builds it, proposes rules and writes them to a file."""

from __future__ import annotations

import json

from phalanx.core.errors import ExitCode, LayoutError, PhalanxError
from phalanx.core.typed_json import JsonObject
from phalanx.launch.rank_link import RankLink
from phalanx.nn.probe import summarize_error
from phalanx.suggest.search import suggest_rules
from phalanx.suggest.suggestion import SUGGESTION_FILE_NAME, SuggestPayload
from phalanx.verify.batches import make_global_microbatches


def suggest_as_rank(document: JsonObject, link: RankLink) -> int:
    """Write the suggestion for the JSON of a SuggestPayload to run_dir/SUGGESTION_FILE_NAME."""
    payload = SuggestPayload.from_json(document)
    job, plan, data_dir = payload.job, payload.plan, payload.data_dir
    batch = make_global_microbatches(job, plan, data_dir, num_steps=1)[0][0]
    try:
        suggestion = suggest_rules(job, plan, batch, is_made_up=data_dir is None)
    except PhalanxError:
        raise
    except Exception as error:  # of the user's forward, in a part of it or with other features
        raise LayoutError(
            f"the forward of {job.model.kind} cannot be followed", why=summarize_error(error)
        ) from None
    (payload.run_dir / SUGGESTION_FILE_NAME).write_text(json.dumps(suggestion.to_json()))
    return ExitCode.OK
