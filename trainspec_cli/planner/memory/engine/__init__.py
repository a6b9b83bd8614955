"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone.

One file a family writes its layers down on a tape (attention, experts, ssm, conv); `step` and `conv_step` replay what
FSDP2 and the pipeline do around them. Known error against traces: at most 2.5% over 50 layouts, sizes and families
(tests/planner/memory/test_engine_memory.py). Not counted: the room that cuDNN works in, an offloaded optimizer.
"""

from trainspec_cli.planner.memory.engine.run import (
    EngineRun,
    engine_peak,
    is_counted,
    run_of,
    tensors_by_cause,
)

__all__ = ["EngineRun", "engine_peak", "is_counted", "run_of", "tensors_by_cause"]
