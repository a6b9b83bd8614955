"""Compare the planner with measured runs: tables, backtests, fits."""
