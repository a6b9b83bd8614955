"""Build a plan's model stages and optimizer, and place them in the mesh, step by step in a fixed order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.engine.accelerators import KINDS, release_unused
from trainspec_cli.engine.build.exchanges import Exchanges, build_exchanges
from trainspec_cli.engine.build.train_state import DTYPES, Allowance, LateSum, Stages, Throttle, TrainState
from trainspec_cli.engine.comm.codec import PARAMETER_CODECS, WireMeter
from trainspec_cli.engine.comm.exchange import Peers, TimeCollective
from trainspec_cli.engine.mesh import Mesh, build_mesh
from trainspec_cli.engine.models.experts import sort_by_expert
from trainspec_cli.engine.models.lora import AdaptedLinear, apply_lora, start_magnitudes
from trainspec_cli.engine.models.own import BlockMaker, LossOfTokens, OwnLinearLoss
from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.optim.optimizer import build_optimizer, without_memory
from trainspec_cli.engine.optim.own import build_own_optimizer
from trainspec_cli.engine.own_code import has_values, is_no_fault, refused
from trainspec_cli.engine.parallel.context import RingCore, UlyssesCore, apply_tensor_parallel, held_positions
from trainspec_cli.engine.parallel.data_parallel import DataParallel, apply_data_parallel, share_streams
from trainspec_cli.engine.parallel.expert import apply_expert_parallel, apply_float8, apply_recompute
from trainspec_cli.engine.parallel.noise import Held as HeldGradient
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import Hidden, Lines, WeightQueue, routers_of, sum_over_sequence
from trainspec_cli.engine.shares import Cut, Share, is_quantised, quantised_parameters, split_quantised
from trainspec_cli.planner.pipeline import cut_layers
from trainspec_cli.recipe.keys.kernels import KERNELS, TORCH, KernelSpec
from trainspec_cli.recipe.keys.model import ModelSpec, OwnModel, embeds_at_both_ends
from trainspec_cli.recipe.parameter_names import is_frozen
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.user_code import LOSS, Extension, arguments, load, user_code_errors

# Test user-defined blocks and losses on small inputs before the first step.
#
# The engine shards, recomputes and resumes blocks, and distributes samples among ranks. So a block must be causal, and
# its output for a sample may depend only on that sample's input. Each token's loss may depend only on that token.

TRIAL_TOKENS = 32
AGREEMENT = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Maximum difference between outputs that should be equal, relative to the largest value."""
AGREEMENT_ELSE = 1e-4
LOSS_TRIAL_TOKENS = 6
LOSS_AGREEMENT = 1e-5
"""Maximum relative difference between the losses of tokens computed together and computed separately."""


def try_own_block(plan: Plan, layer: int, compute: torch.dtype, device: torch.device) -> None:
    """If blocks are user-defined, test one layer's block on its device, in the run's number format. Raises RecipeError
    if the block cannot be trained."""
    if not isinstance(plan.spec.model, OwnModel) or not has_values():
        return
    maker = BlockMaker(plan.spec.model)
    tolerance = AGREEMENT.get(compute, AGREEMENT_ELSE)
    generator = torch.Generator().manual_seed(0)
    block = maker.make_with_values(layer, plan.spec.train.seed).to(device)
    for parameter in block.parameters():
        parameter.data = parameter.data.to(compute)
    length = min(plan.spec.data.seq_len, TRIAL_TOKENS)

    def draw() -> Tensor:
        return torch.randn((2, length, maker.model.hidden_size), generator=generator).to(device, compute)

    def forward(x_BSD: Tensor) -> Any:
        with user_code_errors(maker.extension, "on random input before the run", RecipeError):
            return block(x_BSD)

    def agree(one: Tensor, other: Tensor) -> bool:
        scale = max(1.0, float(one.detach().abs().max()))
        return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale)

    def gradients() -> dict[str, Tensor | None]:
        entering = x_BSD.clone().requires_grad_()
        wanted: dict[str, Tensor | nn.Parameter] = {**dict(block.named_parameters()), "its input": entering}
        leaving = forward(entering)
        with user_code_errors(maker.extension, "in a backward pass before the run", RecipeError):
            weights = torch.linspace(-1.0, 1.0, leaving.shape[-1], device=leaving.device, dtype=leaving.dtype)
            found = torch.autograd.grad((leaving * weights).sum(), list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    # Check the output's shape, including for an empty batch, which a rank gets when its samples are used up.
    x_BSD = draw()
    y_BSD = forward(x_BSD)
    for given in (x_BSD, x_BSD[:0]):
        got = y_BSD if given is x_BSD else forward(given)
        form = f"{given.dtype} of shape {tuple(given.shape)}"
        other = f"{got.dtype} of shape {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
        if other != form:
            hint = "return a tensor with the shape of the input, (samples, tokens, hidden), cast to x.dtype"
            raise refused(maker.extension, f"maps {form} to {other}", hint)
        if not got.isfinite().all():
            hint = "check its initial values"
            raise refused(maker.extension, "returns non-finite values for random input", hint)
    buffers = [buffer.clone() for buffer in block.buffers()]
    if not agree(y_BSD, forward(x_BSD)):
        hint = "remove dropout and other sources of randomness"
        raise refused(maker.extension, "returns a different output at each call", hint)
    if any(not torch.equal(*pair) for pair in zip(buffers, block.buffers(), strict=True)):
        hint = "a block must not keep state from step to step"
        raise refused(maker.extension, "changes a buffer in its forward pass", hint)

    # Check the dependencies: a token's output depends only on its sample, and not on later tokens.
    half = length // 2
    other_BSD = draw()
    later_BSD = torch.cat((x_BSD[:, :half], other_BSD[:, half:]), dim=1)
    if half and not agree(y_BSD[:, :half], forward(later_BSD)[:, :half]):
        hint = "the model predicts the next token: let each token see only itself and earlier tokens"
        raise refused(maker.extension, "lets tokens see later tokens", hint)
    if not agree(y_BSD[:1], forward(torch.cat((x_BSD[:1], other_BSD[1:])))[:1]):
        hint = "layouts spread samples across ranks: do not compute statistics over the first dim"
        raise refused(maker.extension, "mixes the samples of a batch", hint)

    # Check the backward pass: every parameter has a gradient, and recomputing the forward pass does not change it.
    plain = gradients()
    unused = next((name for name, gradient in plain.items() if gradient is None), None)
    if unused is not None:
        raise refused(maker.extension, f"does not use `{unused}`", "remove parameters without a gradient")
    if plan.recompute == "none":
        return
    apply_recompute([block], plan.recompute)
    again = gradients()
    if not all(agree(plain[name], again[name]) for name in plain):  # type: ignore[arg-type]
        hint = "do not change the result of a matmul in place, or set recompute=full"
        raise refused(maker.extension, f"has a different gradient with recompute={plan.recompute}", hint)


def load_loss(
    extension: Extension, options: Mapping[str, object], vocab_size: int, device: torch.device
) -> LossOfTokens:
    """Import a loss, and test it on a few tokens. Raises RecipeError if the code is wrong or the losses of different
    tokens depend on one another."""
    call = partial(load(extension), **arguments(options))

    def loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        with user_code_errors(extension, "in a step", passes=is_no_fault):
            return call(logits_TV, targets_T)  # type: ignore[no-any-return]

    if not has_values():
        return loss
    generator = torch.Generator().manual_seed(0)
    tokens = LOSS_TRIAL_TOKENS
    logits_TV = torch.randn((tokens, vocab_size), generator=generator).to(device).requires_grad_()
    targets_T = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    with user_code_errors(extension, "on random logits before the run", RecipeError):
        whole_T = call(logits_TV, targets_T)
        got = type(whole_T).__name__
        has_form = isinstance(whole_T, Tensor) and whole_T.shape == (tokens,)
        if isinstance(whole_T, Tensor):
            got = "a tensor without a gradient" if has_form else f"a tensor of shape {tuple(whole_T.shape)}"
        if not has_form or not whole_T.requires_grad:
            what = f"returned {got} for {tokens} tokens; expected their losses, of shape ({tokens},)"
            hint = "return each token's loss (reduction='none'); the engine computes the mean"
            raise refused(extension, what, hint)
        parts_T = torch.cat([call(logits_TV[part], targets_T[part]) for part in (slice(1), slice(1, None))])
        (gradient_TV,) = torch.autograd.grad(whole_T.sum(), logits_TV)
    if not torch.allclose(whole_T, parts_T, rtol=LOSS_AGREEMENT, atol=LOSS_AGREEMENT):
        what = "returns a different loss for a token on its own than for the same token among others"
        raise refused(
            extension, what, "compute loss i from logits[i] and targets[i] alone; the engine computes the mean"
        )
    if not gradient_TV.isfinite().all():
        raise refused(extension, "has a gradient that is not finite", "check how it handles small probabilities")
    return loss


# Build a model or one of its stages on meta, allocate it, and fill it with initial values.


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """Build the full model, or only the pipeline stage that consists of `layers`."""
    return import_module(model.record.builder).build(model, seq_len, layers)


def allocate(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Move the model from meta to `device`. With `offload`, parameters are moved to host memory instead."""
    model.to_empty(device="cpu" if offload else device)
    if offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def materialise(
    model: Any, shares: Sequence[Share], device: torch.device, seed: int, positions_S: Tensor | None = None
) -> None:
    """Fill the allocated `model`, whose parameters are `shares`. `positions_S`: the positions that the model sees, if
    it sees only a part of each sequence. Each parameter has a separate generator, seeded with the run's seed and the
    parameter's name, so values depend neither on the layout nor on the order of initialisation. Only one full parameter
    is in memory at a time."""

    def first_values(name: str, full: Tensor) -> Tensor:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        model.init_parameter(name, full, generator)
        return full

    model.seed = seed
    plain, quantised = split_quantised(shares)
    for share in plain:
        full = torch.empty(share.full_shape, dtype=share.parameter.dtype, device=device)
        share.local.copy_(share.part_of(first_values(share.name, full)))
    for matrix in quantised:
        matrix.fill(first_values(matrix.name, torch.empty(matrix.full_shape, device=device)))
    start_buffers(model, device, seed, positions_S)
    start_magnitudes([model])


@torch.no_grad()
def start_buffers(model: Any, device: torch.device, seed: int, positions_S: Tensor | None) -> None:
    model.seed = seed
    model.init_buffers()
    if positions_S is not None:
        model.positions_S = positions_S.to(device)


# Look up a kernel backend's function by name, and install it in a model's modules, which hold their operations as
# attributes.


ENGINE = __package__.rpartition(".")[0]


def load_kernel(op: str, backend: str) -> Callable[..., Any]:
    """Return a backend's function. Raises ImportError if its package is not installed."""
    found = KERNELS[op][backend]
    module, _, name = found.source.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"{ENGINE}.{module}"), name)
    if found.options:
        function = partial(function, **found.options)
    if not found.fused:
        return function
    # Compile separately for each shape, so that results do not depend on earlier shapes.
    fused = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*inputs: Any) -> Any:
        # Evaluation uses other shapes, each of which would trigger a compilation.
        return fused(*inputs) if torch.is_grad_enabled() else function(*inputs)

    return call


def modules_with(part: nn.Module, op: str) -> list[nn.Module]:
    """Return the engine's modules that have this operation. User-defined modules are excluded, because they may use the
    name for something else."""
    found = []
    for module in part.modules():
        definer = next((base for base in type(module).__mro__ if op in vars(base)), None)
        if definer is not None and definer.__module__.startswith(ENGINE):
            found.append(module)
    return found


def apply_kernels(part: nn.Module, kernels: KernelSpec) -> None:
    """Replace default operations with the chosen kernels in every module that has them."""
    for op, backend in kernels.changed.items():
        function = load_kernel(op, backend)
        for module in modules_with(part, op):
            setattr(module, op, function)


# Build one pipeline stage of a plan's model, split over the other axes of the mesh.


def spread_stage(
    plan: Plan, mesh: Mesh, exchanges: Exchanges, noise: NoiseProbe, stage: int
) -> tuple[Any, dict[str, Cut], list[str]]:
    """Build one stage of the model on meta, and split it over the other axes of the mesh.

    Parallelism techniques are applied in a fixed order, each to the result of the previous ones. Return (the module,
    how its parameters are split, names of parameters whose gradients are partial over tp).
    """
    layout = plan.layout
    with torch.device("meta"):
        part = build_model(plan.spec.model, plan.spec.data.seq_len, layers_of(plan, stage))
        apply_lora(part, plan.spec.lora)
    for name, parameter in part.named_parameters():
        if is_frozen(name, plan.spec.optim.groups):
            parameter.requires_grad_(False)
    apply_kernels(part, plan.kernels)
    if plan.spec.precision.matmul == "fp8":
        apply_float8(part.block_modules(), emulate=plan.device == "cpu")

    # Expert, tensor and context parallelism
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    cuts: dict[str, Cut] = {}
    partials: list[str] = []
    if layout.ep > 1:
        group = mesh.expert_group("ep")
        cuts |= apply_expert_parallel(part, Peers(group, exchanges.links.of("ep", group)), sort_by_expert)
    if layout.tp > 1:
        # A schedule that splits the backward pass defers all weight gradients.
        options = {"sequence_parallel": layout.sequence_parallel, "overlaps": not layout.splits_backward}
        partials = apply_tensor_parallel(part, tp, cuts, **options)
    if layout.cp > 1:
        core = RingCore if layout.context_method == "ring" else UlyssesCore
        for attention in part.attention_modules():
            attention.core = core(attention.core, cp)
    if layout.cp > 1 or layout.tp > 1:
        sum_over_sequence(routers_of([part]), [cp, tp])
    for name, module in part.named_modules():
        cut = cuts.get(f"{name}.nf4_magnitudes")
        if cut is not None:
            module.place(cut)
        if isinstance(module, AdaptedLinear) and f"{name}.lora_a" in cuts:  # ranks hold different columns
            module.sum_over_ranks = torch.compiler.disable(tp.sum_)
    if mesh.stage.size() > 1:
        for norm in part.norm_modules():
            norm.sum_over_ranks = Peers(mesh.stage.get_group(), exchanges.clock.collective).sum_

    apply_recompute(part.block_modules(), plan.recompute, compiled=plan.spec.compile)
    if plan.spec.compile:
        for module in part.compile_modules():
            module.compile()

    # Data parallelism
    held: dict[str, HeldGradient] = {}
    for name, _ in part.named_parameters():
        if is_twin(plan, name):
            held[name] = "twin"
        elif name in partials:
            held[name] = "partial"
        else:
            held[name] = "own" if name in cuts or layout.tp == 1 else "copied"
    travels_in_full = plan.comm.parameters in ("full", plan.compute)
    how = DataParallel(
        compute=DTYPES[plan.compute],
        reduce=DTYPES[plan.spec.precision.reduce],
        free_after_forward=not layout.keeps_parameters,
        offload=plan.offload != "none",
        replicas=replace(exchanges.gradient_peers(mesh, "dp_replicate"), tiers=exchanges.replica_tiers),
        time=exchanges.of,
        time_wait=exchanges.clock.collective,
        noise=noise,
        held=held,
        compression=exchanges.compression,
        parameter_codec=None if travels_in_full else PARAMETER_CODECS[plan.comm.parameters],
        sums=exchanges.sums,
        routes=exchanges.routes,
        losses=exchanges.losses,
        name=f"stage{stage}",
    )
    experts = [module.experts for module in part.expert_modules()]
    expert_shard = mesh.experts["expert_shard"] if mesh.experts else None
    apply_data_parallel(part, experts, mesh.shard, expert_shard, how)
    return part, cuts, partials


def layers_of(plan: Plan, stage: int) -> range | None:
    """Return the layers of `stage`; None means all layers."""
    if plan.layout.num_stages == 1:
        return None
    return cut_layers(plan.spec.model.num_layers, plan.layout)[stage]


def is_twin(plan: Plan, name: str) -> bool:
    """Return whether a parameter exists at both ends of the pipeline."""
    return embeds_at_both_ends(plan.spec.model) and name == "embed.weight" and plan.layout.num_stages > 1


def _refuse_compiling(plan: Plan, device_type: str) -> None:
    """Raise RecipeError if the plan needs torch.compile but the device has no compiler."""
    if KINDS[device_type].compiles:
        return
    compiled = [f"kernels.{op}" for op, name in vars(plan.kernels).items() if KERNELS[op][name].needs_compiler]
    if plan.spec.compile or compiled:
        key = "compile" if plan.spec.compile else compiled[0]
        message = f"`{key}` needs torch.compile, which cannot compile for a device of kind `{device_type}`"
        hint = "set compile=false" if plan.spec.compile else f"set {key}={TORCH}"
        raise RecipeError(Problem("unsupported", message, key, hint))


def _shares_of(plan: Plan, part: Any, cuts: Mapping[str, Cut]) -> list[Share]:
    """Return the parameters of a stage that this rank holds."""
    layout = plan.layout
    held = []
    for name, parameter in (*part.named_parameters(), *quantised_parameters(part)):
        # Number of ranks that hold a copy: all replicas; also all ranks of tp if the parameter is not split, and all
        # data-parallel ranks if it is quantised. A tied embedding exists twice.
        copies = layout.dp_replicate * (1 if name in cuts else layout.tp)
        copies *= (layout.shards if is_quantised(name) else 1) * (2 if is_twin(plan, name) else 1)
        held.append(Share(name, parameter, cuts.get(name), copies))
    return held


def _optimizer_of(
    plan: Plan, trained: Sequence[Share], zeros: Callable[[Tensor], Tensor], time: TimeCollective
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer. `zeros` creates its state, and `time` times the exchanges of the update."""
    if plan.spec.optim.is_own:
        return build_own_optimizer(trained, plan.spec, zeros=zeros)
    update = load_kernel("adamw", plan.kernels.adamw)
    return build_optimizer(trained, plan.spec.optim, update, zeros, time, DTYPES[plan.compute])


def build_train_state(
    plan: Plan,
    device: torch.device,
    mesh: Mesh | None = None,
    clock: StepClock | None = None,
    wire: WireMeter | None = None,
    *,
    fill: bool = True,
) -> TrainState:
    """Build each stage on meta (kernels -> fp8 -> cut -> recompute -> compile -> shard -> materialise), and then the
    optimizer.

    `clock` and `wire` come from the state that the new one replaces. Without `fill`, parameters have no values and
    moments have no memory yet, because `reshard` provides both.
    """
    _refuse_compiling(plan, device.type)
    mesh = mesh or build_mesh(plan.layout, device.type)
    clock = clock or StepClock(device)
    layout = plan.layout
    compute = DTYPES[plan.compute]
    positions_S = None
    if layout.cp > 1:
        positions_S = held_positions(plan.spec.data.seq_len, layout.context_method, mesh.rank("cp"), layout.cp)
    parts: dict[int, Any] = {}
    parts_of_layers: dict[int, float] = {}
    shares: list[Share] = []
    partials: list[Share] = []
    exchanges = build_exchanges(plan, mesh, device, clock, wire or WireMeter())
    cp, tp = (exchanges.peers_along(mesh, axis) for axis in ("cp", "tp"))
    queue = WeightQueue()
    noise = NoiseProbe(device, cp, tp, Peers(mesh.ends, clock.collective))
    for stage in layout.stages_of_rank(mesh.rank("pp")):
        part, cuts, partial_names = spread_stage(plan, mesh, exchanges, noise, stage)
        for extension in LOSS.named(plan.spec.train.loss, plan.spec.train.loss_options):
            if part.loss is not None:
                vocab_size = plan.spec.model.vocab_size  # type: ignore[union-attr]
                part.loss = OwnLinearLoss(load_loss(extension, plan.spec.train.loss_options, vocab_size, device))
        if layout.splits_backward:
            queue.apply(part)
        parts[stage] = part
        layers = layers_of(plan, stage)
        parts_of_layers[stage] = 1.0 if layers is None else len(layers) / plan.spec.model.num_layers
        allocate(part, device, offload=plan.offload != "none")
        held = _shares_of(plan, part, cuts)
        if fill:
            try_own_block(plan, (layers or range(1))[0], compute, device)
            materialise(part, held, device, plan.spec.train.seed, positions_S)
        else:
            start_buffers(part, device, plan.spec.train.seed, positions_S)
        shares += held
        partials += [share for share in held if share.name in partial_names and share.is_trained]
    if device.type != "cpu":
        share_streams(parts.values())
    trained = [share for share in shares if share.is_trained]
    if not trained:
        message = f"`optim.groups` freezes all parameters of pipeline stage {mesh.rank('pp')}"
        raise RecipeError(Problem("unsupported", message, "optim.groups", "set layout.pp=1"))
    optimizer = _optimizer_of(plan, trained, torch.zeros_like if fill else without_memory, clock.collective)
    # Two kinds of gradients are not summed over ranks in the backward passes: those of parameters that every tp rank
    # holds in full, and those of a tied embedding, which has copies at both ends of the pipeline.
    twins = [share for share in trained if is_twin(plan, share.name)]
    ends = Peers(mesh.ends, exchanges.counted("gradients", clock.collective))
    ep_group = mesh.expert_group("ep").group_name if mesh.experts else None
    # Filling has allocated full parameters, but steps need memory blocks of other sizes.
    release_unused(device)
    late = ((partials, exchanges.gradient_peers(mesh, "tp")), (twins, ends))
    return TrainState(
        device=device,
        mesh=mesh,
        clock=clock,
        links=exchanges.links,
        stages=Stages(
            layout=layout,
            parts=parts,
            lines=Lines(mesh.group("pp"), mesh.upstream, device),
            queue=queue,
            hidden=Hidden(plan.spec.model.hidden_size, layout.tp if layout.sequence_parallel else 1, compute),
            clock=clock,
            throttle=Throttle(parts_of_layers, device=device),
            allowance=Allowance(),
            noise=noise,
        ),
        shares=shares,
        optimizer=optimizer,
        late_sums=[LateSum(summed, peers) for summed, peers in late if summed],
        positions_S=positions_S,
        routers=routers_of(list(parts.values())),
        norms=[norm for part in parts.values() for norm in part.norm_modules()],
        spread_experts={one.name for one in shares if one.cut and one.cut.group.group_name == ep_group},
        compression=exchanges.compression,
        wire=exchanges.wire,
        sums=exchanges.sums,
        losses=exchanges.losses,
    )
