"""Techniques that are applied externally to a plain model, in a fixed order (`build.train_state`)."""
