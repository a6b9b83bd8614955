"""Techniques applied to a plain model from outside, in one fixed order (`build.train_state`)."""
