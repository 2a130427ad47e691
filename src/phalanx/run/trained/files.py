"""Names of the files that rank 0 writes for the process that started the ranks."""

# The facts of an evaluation, once, at its end.
RESULT_FILE_NAME = "result.json"
# How many batches of an evaluation are done, now and then.
PROGRESS_FILE_NAME = "progress.json"
# A line for each generated token, and for the end of each text.
TOKENS_FILE_NAME = "tokens.jsonl"
