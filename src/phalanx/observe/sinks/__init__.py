"""One file per sink. Each offers `open_sink(run_dir) -> Sink` and says what it needs:

`REQUIRES`: the packages without which it cannot open; its extra has the sink's name. `PRELOAD`:
modules to import once, before ranks are forked. `IS_APART`: whether it runs in a process of its own
(`observe.sink_process`), for libraries with threads, hooks and servers of their own. Such a file
also offers `environment(run_dir)`: variables of that process that the user may have set otherwise.
"""
