"""Names of the files that rank 0 writes for the process that started the ranks."""

# The facts of an evaluation, once, at its end.
RESULT = "result.json"
# How many batches of an evaluation are done, now and then.
PROGRESS = "progress.json"
# A line for each generated token, and for the end of each text.
TOKENS = "tokens.jsonl"
