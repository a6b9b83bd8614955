"""The cut of a model into pipeline stages by the times of its layers."""
