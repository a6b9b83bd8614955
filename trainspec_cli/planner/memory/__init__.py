"""Peak memory. There are four models, each of which answers a different question:

- `engine/`: trainspec's engine, tensor by tensor. It computes an eager run's peak by arithmetic alone, within 3% of
a trace. - `predict.estimate_memory`: any framework, from published formulas and constants. It is used for compiled
runs, for runs that the engine does not support, and for the backtest's published runs. - `planner/this_machine.py`: the
resident bytes of one process on this machine's CPU, including holes in the heap, from a probe. - the trace
(`run/tools.py`): not a prediction but a count of the engine's real step under fake tensors. It is used to check
`engine/`, and for `plan --trace`.

For a run on devices, `predict.predict_memory` chooses between the first two. Nothing else predicts memory.
"""
