"""Peak memory of trainspec's engine, tensor by tensor. The numbers are the same as for a traced step, but calculated
rather than measured.

`blocks` and `conv` record the layers of each family on a `tape`. `step` and `conv` replay FSDP2 and the pipeline around
them, based on the `units` that FSDP2 shards. Known error relative to traces: at most 2.5% over 50 layouts, sizes and
families (tests/planner/memory/test_engine_memory.py). Not counted: cuDNN's workspace and an offloaded optimizer."""
