"""Other engines under the training spec: a small protocol, and the judge of their answers (docs/spec)."""
