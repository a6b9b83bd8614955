"""Pure decisions on plain numbers, called by the engine, the supervisor and the simulator alike."""
