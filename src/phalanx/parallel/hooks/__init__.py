"""How gradients are compressed on their way between ranks: one file for each, named as
parallel.compress has it."""
