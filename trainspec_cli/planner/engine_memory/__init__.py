"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone.

Known error against traces: 1% over 50 layouts and sizes of dense decoders.
"""

from trainspec_cli.planner.engine_memory.run import EnginePeak, EngineRun, is_counted, run_of
from trainspec_cli.planner.engine_memory.step import engine_peak

__all__ = ["EnginePeak", "EngineRun", "engine_peak", "is_counted", "run_of"]
