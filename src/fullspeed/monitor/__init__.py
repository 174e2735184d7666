"""Watching a run: sinks for its scalars, timers, floating-point operations, memory and profiler windows."""
