"""How long a step takes on a cluster that need not be there: one set of formulas for every layout,
model and framework. Torch-free; numpy is imported with `columns` and what uses it."""
