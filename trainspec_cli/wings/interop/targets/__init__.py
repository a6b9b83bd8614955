"""One table per engine, which maps recipe keys to engine keys."""
