"""Rules of thumb with numbers: a file per group, each with its `RULES`.

A file that is put here is checked with every plan (phalanx.plan.advice.check_rules).
"""
