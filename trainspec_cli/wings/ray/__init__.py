"""Runs on a Ray cluster (`cluster.manager=ray`): Ray starts the nodes' agents and the supervisor, restarts them on
other nodes, and reports lost nodes. `run.recovery` decides what happens then, as everywhere."""
