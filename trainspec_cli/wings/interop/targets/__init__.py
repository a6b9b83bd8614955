"""One table for each engine, which maps recipe keys to engine keys."""
