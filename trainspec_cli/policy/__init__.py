"""Pure decisions on plain numbers, called alike by the engine, the supervisor and the simulation of a run."""
