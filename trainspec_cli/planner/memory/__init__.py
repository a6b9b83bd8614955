"""Peak memory. There are four models, each for a different question:

- `engine/`: trainspec's own engine, tensor by tensor. An eager run's peak from arithmetic alone, within 3% of a trace.
- `predict.estimate_memory`: any framework, from published formulas and constants. Compiled runs, what the engine does
  not build, and the backtest's published runs.
- `planner/this_machine.py`: one process on this machine's CPU, from a probe of it: resident bytes, with the heap's
  holes.
- the trace (`run/tools.py`): not a prediction but the engine's real step under fake tensors, counted. It
  checks `engine/`, and answers `plan --trace`.

`predict.predict_memory` chooses between the first two for a run on devices. Nothing else predicts memory.
"""
