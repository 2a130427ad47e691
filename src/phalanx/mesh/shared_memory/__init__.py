"""Collectives, sends and receives of ranks on one host through memory that they share.

`arena` is the memory of one rank, which the others map. `board` is where a rank writes how far it
is, and reads how far the others are. `channel` takes the operations of one process group in order:
`transfers` and `messages` say what each of them moves. `backend` takes the calls that reach torch's
process groups, and `opening` lets the ranks find each other.

A rank puts its operand where the others can read it, and goes on. When all have done so each does
its part of the work: sums its slice, or copies what it needs. Nothing runs in another process, and
no word has two writers.
"""
