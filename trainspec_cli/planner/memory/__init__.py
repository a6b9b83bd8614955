"""Memory models: of the engine tensor by tensor, of other frameworks, of this CPU, and of a trace."""
