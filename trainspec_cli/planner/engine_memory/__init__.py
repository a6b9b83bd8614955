"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone."""

from trainspec_cli.planner.engine_memory.step import EnginePeak, engine_peak, is_counted

__all__ = ["EnginePeak", "engine_peak", "is_counted"]
