"""`phalanx plan --suggest-rules`: print rules to paste for the model of a job, and perhaps
verify them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from phalanx.cli._arguments import build_overrides_of_model, split_job_file_and_overrides
from phalanx.cli._json import print_json
from phalanx.cli._verify_options import VerifyOptions
from phalanx.cli.verify import print_verification
from phalanx.job.load import load_job
from phalanx.suggest.drive import suggest_rules_for
from phalanx.suggest.suggestion import NameAndReason, Suggestion


def print_suggestion(
    arguments: Sequence[str], model: str | None, *, verify_too: bool, as_json: bool
) -> int:
    """Print the rules for the job of these arguments. Returns 0, or the exit code of verify."""
    job_file, overrides = split_job_file_and_overrides(arguments)
    overrides = build_overrides_of_model(model, overrides)
    suggestion = suggest_rules_for(load_job(job_file, overrides))
    if as_json:
        print_json("suggested-rules", suggestion.to_json())
    else:
        print("\n".join(_describe_suggestion(suggestion)))
    if not suggestion.rules or not verify_too:
        return 0
    job_files = [job_file] if job_file else []
    verified = [*job_files, *overrides, f"parallel.rules={_format_inline_table(suggestion.rules)}"]
    # Without tp no rule has anything to cut.
    if not any(word.startswith("parallel.tp=") for word in overrides):
        verified.append("parallel.tp=2")
    has_ranks = any(word.startswith("parallel.ranks=") for word in overrides)
    options = VerifyOptions(ranks=None if has_ranks else 2, resume=False, as_json=as_json)
    return print_verification(verified, options)


def _describe_suggestion(suggestion: Suggestion) -> list[str]:
    """The lines of a table of TOML, with the reasons as comments."""
    lines = []
    if suggestion.fed_with:
        lines.append(f"# tried with made-up inputs: {suggestion.fed_with}")
    if suggestion.rules:
        entries = {
            pattern: _format_rule_entry(pattern, rule)
            for pattern, (rule, _) in suggestion.rules.items()
        }
        width = max(map(len, entries.values()))
        lines.append("[parallel.rules]")
        for pattern, (_, why) in suggestion.rules.items():
            lines.append(f"{entries[pattern]:<{width}}  # {why}")
    else:
        why_none = ""
        if suggestion.why_none:
            why_none = f": {suggestion.why_none}"
        lines.append(f"# nothing of this module can be cut by a rule that was tried{why_none}")
    lines += [
        f"# whole on every rank: {pattern} ({why})" for pattern, why in suggestion.whole.items()
    ]
    if suggestion.rules:
        lines.append(
            "# phalanx verify JOB.toml parallel.tp=2 proves or refutes them, as does --verify here"
        )
    return lines


def _format_rule_entry(pattern: str, rule: str) -> str:
    # A JSON string of such words is a TOML string, too.
    return f"{json.dumps(pattern)} = {json.dumps(rule)}"


def _format_inline_table(rules: Mapping[str, NameAndReason]) -> str:
    entries = [_format_rule_entry(pattern, rule) for pattern, (rule, _) in rules.items()]
    return "{" + ", ".join(entries) + "}"
