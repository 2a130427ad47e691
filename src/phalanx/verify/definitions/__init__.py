"""Parts of training that no layout runs, or that a row's tolerance hides, each beside a plain
definition of it."""
