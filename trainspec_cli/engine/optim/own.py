"""A user-defined optimizer (`optim.name=FILE.py:make`), extended with the functions that the engine needs: skipping or
clipping entire updates, and saving and loading state in every layout.

The engine passes this rank's part of each parameter to it, so the optimizer has to be elementwise: an element's update
may depend only on the element, its gradient and its state. This property and the form of the state are tested on small
tensors before the run begins (`try_out`). Most optimizers create their state in the first update, but a checkpoint may
have to be loaded earlier. The same entries are therefore allocated here, with a flag that shows whether the optimizer
uses them yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.core.errors import Problem, RecipeError, WorkerError
from trainspec_cli.engine.optim.optimizer import parameter_groups
from trainspec_cli.engine.own_code import is_no_fault
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.user_code import OPTIMIZER, Extension, arguments, load, user_code_errors

Entry = Tensor | int | float | bool
Make = Callable[..., torch.optim.Optimizer]
STARTED = "trainspec_started"
"""The entry of each parameter's state that shows whether the other entries are in use: 1 after the first update."""
OWN_TO_THE_ENGINE = ("params", "lr")
"""The settings of a parameter group that the engine changes."""

TRIAL_UPDATES = 3
TRIAL_SIDE = 6
AGREEMENT = 1e-5
"""Maximum relative difference between the updates of a full tensor and of its parts. It is not 0 because vectorised
kernels round the ends of tensors differently."""


@dataclass(frozen=True)
class StateForm:
    """The form of one entry of a parameter's state."""

    shaped: bool
    """True if the entry has the parameter's shape; otherwise it is a number, or a tensor with one number."""
    dtype: torch.dtype
    kind: type = Tensor
    """The entry's type in the optimizer: a tensor, or a Python number, which is saved as fp64."""
    device: str = "cpu"
    """Device type, if the entry is a tensor."""

    @staticmethod
    def of(value: Entry) -> StateForm:
        if isinstance(value, Tensor):
            return StateForm(value.dim() > 0, value.dtype, device=value.device.type)
        return StateForm(shaped=False, dtype=torch.float64, kind=type(value))


def build_own_optimizer(
    shares: Sequence[Share], spec: RunSpec, zeros: Callable[[Tensor], Tensor] = torch.zeros_like
) -> OwnOptimizer:
    """Try out the recipe's optimizer, and then create it. `zeros` allocates memory for the state. Raises RecipeError if
    the code is wrong or cannot train parts of parameters."""
    extension = OPTIMIZER.named(spec.optim.name, spec.optim.options)[0]
    optim = spec.optim
    call = load(extension)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with user_code_errors(extension, "when the optimizer was created", RecipeError):
            made = call(groups, lr=optim.lr, **arguments(optim.options))
        if not isinstance(made, torch.optim.Optimizer):
            message = f"`{extension.path}`: {extension.text} returned {type(made).__name__}"
            raise RecipeError(Problem("wrong_type", f"{message}; expected a torch.optim.Optimizer", extension.path))
        return made

    device = shares[0].local.device if shares else torch.device("cpu")
    # Update small tensors of each number of dimensions a few times, once whole and once split in two, because an
    # optimizer that is not elementwise would train differently when sharded.
    forms = {}
    for dim in sorted({2} | {share.parameter.dim() for share in shares}):
        whole, forms[dim] = _train(make, extension, dim, 1, device)
        cut, _ = _train(make, extension, dim, 2, device)
        if not torch.allclose(whole, cut, rtol=AGREEMENT, atol=AGREEMENT):
            message = (
                f"`{extension.path}`: {extension.text} updates a tensor differently from its parts: it is not "
                "elementwise, and the engine shards parameters"
            )
            hint = "an element's update may depend only on its own value, gradient and state (docs/extending.md)"
            raise RecipeError(Problem("unsupported", message, extension.path, hint))
    shaped = [form.dtype.itemsize for form in forms[2].values() if form.shaped]
    state_bytes = float(sum(shaped))
    if optim.state_bytes != state_bytes:
        path = "optim.state_bytes"
        found = f"{extension.text} needs {state_bytes:g} bytes of state per parameter"
        message = f"`{path}` is {optim.state_bytes:g}, but {found}"
        raise RecipeError(Problem("contradiction", message, path, f"set {path}={state_bytes:g}"))
    groups = parameter_groups(shares, optim)
    made = make([dict(group) for group in groups])
    given = {id(parameter) for group in groups for parameter in group["params"]}
    taken = [id(parameter) for group in made.param_groups for parameter in group["params"]]
    if set(taken) != given:
        message = (
            f"`{extension.path}`: {extension.text} updates {len(taken)} of the {len(given)} parameters passed to it"
        )
        raise RecipeError(
            Problem("wrong_type", message, extension.path, "pass all parameter groups on to torch.optim.Optimizer")
        )
    return OwnOptimizer(made, extension, forms, zeros)


class OwnOptimizer(torch.optim.Optimizer):
    """Wraps the user-defined optimizer. `state` contains the entries to save, as tensors. `forms`: the forms of the
    state's entries in the trial, by the parameter's number of dimensions."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        extension: Extension,
        forms: Mapping[int, Mapping[str, StateForm]],
        zeros: Callable[[Tensor], Tensor] = torch.zeros_like,
    ):
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self._inner = inner
        self._extension = extension
        self._forms_by_dim = forms
        self._made_at_once = {parameter: set(inner.state.get(parameter, {})) for parameter in self._parameters()}
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        for parameter in self._parameters():
            # The flag is 0 until the first update.
            saved = {STARTED: torch.zeros(())}
            own = self._inner.state.get(parameter, {})
            for name, form in self._forms(parameter).items():
                value = own.get(name)
                if isinstance(value, Tensor):
                    saved[name] = value
                elif form.shaped:
                    saved[name] = zeros(parameter.detach().to(form.dtype))
                else:
                    saved[name] = torch.tensor(value or 0, dtype=form.dtype, device=form.device)
            self.state[parameter] = saved

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _forms(self, parameter: nn.Parameter) -> Mapping[str, StateForm]:
        return self._forms_by_dim[parameter.dim()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters unless `found_inf` is 1. Gradients are divided by `grad_scale`. The host waits for
        `found_inf`."""
        found_inf = self.found_inf
        grad_scale = self.grad_scale
        self.found_inf = None
        self.grad_scale = None
        if found_inf is not None and found_inf.item():
            return
        parameters = self._parameters()
        if grad_scale is not None:
            torch._foreach_div_([one.grad for one in parameters if one.grad is not None], grad_scale)
        for parameter in parameters:
            # Give the optimizer the saved state, which may come from a checkpoint; before the first update, there is
            # none.
            saved = self.state[parameter]
            own = self._inner.state[parameter]
            if saved[STARTED].item():
                for name, form in self._forms(parameter).items():
                    own[name] = saved[name] if form.kind is Tensor else form.kind(saved[name].item())
            else:
                for name in set(own) - self._made_at_once[parameter]:
                    del own[name]
        settings = _settings(self._inner)
        with user_code_errors(self._extension, "in an update", passes=is_no_fault):
            self._inner.step()
        for before, after in zip(settings, _settings(self._inner), strict=True):
            for name, value in after.items():
                if before.get(name) != value:
                    raise self._refuse(
                        f"changed `{name}` of its parameter groups, which checkpoints do not store", name
                    )
        for parameter in parameters:
            # Save the optimizer's current state, whose form must be the same as during the trial.
            saved = {STARTED: torch.ones(())}
            forms = self._forms(parameter)
            for name, value in _kept(self._inner.state[parameter]).items():
                shape = value.shape if isinstance(value, Tensor) else torch.Size()
                if forms.get(name) != StateForm.of(value) or (forms[name].shaped and shape != parameter.shape):
                    raise self._refuse(f"stores `{name}` in a different form than in its first updates", name)
                saved[name] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            if lost := forms.keys() - saved.keys():
                raise self._refuse(f"no longer stores `{min(lost)}`", min(lost))
            self.state[parameter] = saved

    def _refuse(self, what: str, name: str) -> WorkerError:
        message = f"`{self._extension.path}`: {self._extension.text} {what}"
        hint = f"keep {name} in `self.state[parameter]`, created in the first update"
        return WorkerError(Problem("own_code", message, self._extension.path, hint))


def _kept(state: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entries of a parameter's state that have a value."""
    return {str(name): value for name, value in state.items() if value is not None}


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the numbers in the parameter groups, except those that the engine sets."""
    return [
        {
            name: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            for name, value in group.items()
            if name not in OWN_TO_THE_ENGINE and (not isinstance(value, Tensor) or value.device.type == "cpu")
        }
        for group in optimizer.param_groups
    ]


# The trial


def _train(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    extension: Extension,
    dim: int,
    parts: int,
    device: torch.device,
) -> tuple[Tensor, dict[str, StateForm]]:
    """Make `TRIAL_UPDATES` updates of a tensor that is split into `parts` parts. Return (its values, the entries of the
    state)."""
    generator = torch.Generator().manual_seed(dim)

    def draw() -> list[Tensor]:
        drawn = torch.randn((TRIAL_SIDE,) * dim, generator=generator).to(device)
        return [part.clone() for part in drawn.chunk(parts)] if dim else [drawn]

    parameters = [nn.Parameter(part, requires_grad=False) for part in draw()]
    optimizer = make([{"params": parameters, "weight_decay": 0.1 if dim > 1 else 0.0}])
    found: dict[str, StateForm] = {}
    for update in range(TRIAL_UPDATES):
        for parameter, gradient in zip(parameters, draw(), strict=True):
            parameter.grad = gradient
        with user_code_errors(extension, "in an update of small tensors before the run", RecipeError), torch.no_grad():
            optimizer.step()
        parameter = parameters[0]
        entries = {}
        for name, value in _kept(optimizer.state.get(parameter, {})).items():
            is_saved = isinstance(value, (bool, int, float)) or (
                isinstance(value, Tensor) and value.shape in (parameter.shape, torch.Size())
            )
            if not is_saved:
                got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                message = (
                    f"`{extension.path}`: {extension.text} keeps `{name}`, {got}, for a parameter of "
                    f"{tuple(parameter.shape)}; expected tensors of the parameter's shape and single numbers"
                )
                raise RecipeError(Problem("unsupported", message, extension.path))
            entries[name] = StateForm.of(value)
        if update and entries != found:
            message = f"`{extension.path}`: {extension.text} changes which state entries exist between updates"
            hint = "create all of them in the first update"
            raise RecipeError(Problem("unsupported", message, extension.path, hint))
        found = entries
    return torch.cat([parameter.detach().flatten() for parameter in parameters]), found
