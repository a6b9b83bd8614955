"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone.

Known error against traces: at most 1.5% over 50 layouts, sizes and families of models of text (tests/planner).
"""

from trainspec_cli.planner.engine_memory.step import (
    EnginePeak,
    EngineRun,
    engine_peak,
    is_counted,
    run_of,
    tensors_by_cause,
)

__all__ = ["EnginePeak", "EngineRun", "engine_peak", "is_counted", "run_of", "tensors_by_cause"]
