"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone.

One file a family writes its layers down on a tape (attention, experts, ssm, conv), `step` and `conv_step` replay what
FSDP2 and the pipeline's schedule do around them. Known error against traces, at most: dense decoders 0.4% (fp8 2.2%),
experts 1%, windows and sinks 1%, state-space layers 0.6%, convolutions 0.5% (1.1% with several micro-batches).
Not counted: what cuDNN's convolutions take to work in, nor an offloaded optimizer.
"""

from trainspec_cli.planner.engine_memory.run import EnginePeak, EngineRun, is_counted, run_of
from trainspec_cli.planner.engine_memory.step import engine_peak

__all__ = ["EnginePeak", "EngineRun", "engine_peak", "is_counted", "run_of"]
