"""Peak memory of trainspec's own engine, tensor by tensor: what a trace of its step counts, from arithmetic alone.

`blocks` and `conv` write the layers of each family down on a `tape`; `step` and `conv` replay what FSDP2 and the
pipeline do around them, on the `units` that FSDP2 shards. Known error against traces: at most 2.5% over 50 layouts,
sizes and families (tests/planner/memory/test_engine_memory.py). Not counted: the room that cuDNN works in, an offloaded
optimizer.
"""
