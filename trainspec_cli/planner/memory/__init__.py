"""Peak memory. There are four models, each for a different question:

- `engine/`: trainspec's engine, tensor by tensor. Gives an eager run's peak from arithmetic alone, within 3% of a
trace. - `predict.estimate_memory`: any framework, from published formulas and constants. Used for compiled runs, for
what the engine does not build, and for the backtest's published runs. - `planner/this_machine.py`: one process on this
machine's CPU, from a probe of it: resident bytes, including holes in the heap. - the trace (`run/tools.py`): not a
prediction but a count of the engine's real step under fake tensors. It checks `engine/`, and answers `plan --trace`.

`predict.predict_memory` chooses between the first two for a run on devices. Nothing else predicts memory.
"""
