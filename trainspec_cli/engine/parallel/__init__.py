"""Parallelism techniques, which are applied to a plain model from outside, in a fixed order (`build.train_state`)."""
