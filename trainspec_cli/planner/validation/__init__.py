"""The planner against measured runs: reading tables of them, backtests, fits."""
