"""Names of the files that rank 0 writes for the process that started the ranks."""

RESULT = "result.json"  # the facts of an evaluation, once, at its end
PROGRESS = "progress.json"  # how many batches of an evaluation are done, now and then
TOKENS = "tokens.jsonl"  # a line for each generated token, and for the end of each text
