"""What `trainspec run` counts steps by."""

_hooks = []


def register_optimizer_step_post_hook(hook):
    _hooks.append(hook)


class Optimizer:
    def __init__(self, *state):
        self.state = dict(enumerate(state))
        self.param_groups = [{} for _ in state] or [{}]

    def load_state_dict(self, state):
        self.state.update(state)

    def step(self):
        for hook in _hooks:
            hook(self, (), {})
