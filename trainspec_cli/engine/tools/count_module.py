"""Count a model of transformers and trace its blocks, without memory: what a plan needs to know about it."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.data.huggingface.folder import compare_tensors
from trainspec_cli.data.huggingface.module_tensors import open_module
from trainspec_cli.engine.build.initial import MappedTensors
from trainspec_cli.engine.models.lora import apply_lora
from trainspec_cli.engine.models.transformers_module import TransformersLanguageModel, block_list, make_module
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.engine.tools.trace import Ledger
from trainspec_cli.recipe.keys.model import TracedPart, TransformersModel
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.keys.training import TARGETS, LoraSpec
from trainspec_cli.recipe.results.tools import ModuleCount, ModuleRequest

CPU = torch.device("cpu")
FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
POSITION_KEYS = ("max_position_embeddings", "n_positions", "block_size", "max_seq_len")
"""Keys of config.json for the largest number of positions."""
POSITION_BUFFERS = ("embed_positions", "position_ids")
"""Buffers with an entry for each position."""
OUTSIDE = TracedPart(())
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def run(request: ModuleRequest) -> ModuleCount:
    """Describe the model. Errors in the folder or the recipe become problems in the result."""
    try:
        return ModuleCount(_count(request))
    except TrainspecError as error:
        return ModuleCount(problems=tuple(error.problems))


def _count(request: ModuleRequest) -> TransformersModel:
    described = json.loads(request.config)
    draft = TransformersModel(
        config=request.config,
        num_layers=1,
        hidden_size=1,
        vocab_size=1,
        block_list="",
        prefix="",
        blocks=(),
        outside=OUTSIDE,
        traced_seq_len=request.seq_len,
        traced_width=FORMATS[request.compute].itemsize,
        folder=request.folder,
        trust_remote_code=request.trust_remote_code,
        name=str(described.get("_name_or_path") or described.get("model_type")),
    )
    module = make_module(draft)
    blocks = block_list(module)
    embedding = module.get_input_embeddings()
    draft = replace(
        draft,
        num_layers=len(module.get_submodule(blocks)),
        hidden_size=embedding.embedding_dim,
        vocab_size=embedding.num_embeddings,
        block_list=blocks,
        prefix=f"{module.base_model_prefix}." if module.base_model_prefix else "",
        learned_positions=_positions_of(module),
        tied_embeddings=module.get_output_embeddings().weight is embedding.weight,
    )
    _check_blocks(module, blocks)
    if request.has_weights:
        _check_weights(module, draft)
    named = module.get_submodule(blocks).named_modules()
    linears = {name.rpartition(".")[2] for name, one in named if isinstance(one, nn.Linear)}
    if not linears & (linears if request.lora.targets == TARGETS else set(request.lora.targets)):
        request = replace(request, lora=LoraSpec())  # a rule refuses these targets
    if draft.learned_positions:  # a rule refuses longer samples
        request = replace(request, seq_len=min(request.seq_len, draft.learned_positions))
        draft = replace(draft, traced_seq_len=request.seq_len)
    try:
        try:
            return _traced(draft, request)
        except RuntimeError:  # torch infers the shapes of a grouped matmul only in bf16
            return _traced(replace(draft, traced_width=2), replace(request, compute="bf16"))
    except Exception as error:  # whatever a module raises that looks at values, such as a router that counts tokens
        message = f"{type(module).__name__} cannot be traced without values: {error}"
        hint = "train it with `trainspec run`"
        raise RecipeError(Problem("unsupported", message, "model.backend", hint)) from error


def _positions_of(module: Any) -> int:
    """Return the number of positions in the module's tables; 0 if it computes positions of any length. Tables are
    embeddings with a row for each position in config.json (OPT and BART have two more), and buffers of these names."""
    config = module.config.get_text_config()
    longest = next((found for key in POSITION_KEYS if isinstance(found := getattr(config, key, None), int)), 0)
    embeddings = [
        one.num_embeddings
        for one in module.modules()
        if isinstance(one, nn.Embedding) and one is not module.get_input_embeddings()
    ]
    buffers = [
        size
        for name, buffer in module.named_buffers()
        if name.rpartition(".")[2] in POSITION_BUFFERS
        for size in buffer.shape
    ]
    return longest if {longest, longest + 2} & {*embeddings, *buffers} else 0


def _check_blocks(module: Any, blocks: str) -> None:
    """Reject a parameter that two blocks share, because each block is sharded on its own."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    once = {name for name, _ in module.named_parameters()}
    shared = [name for name in names if name not in once and name.startswith(f"{blocks}.")]
    if shared:
        message = f"{type(module).__name__} uses {shared[0]} in several blocks, so they cannot be sharded separately"
        raise RecipeError(Problem("unsupported", message, "model.backend", "train it with `trainspec run`"))


def _check_weights(module: Any, model: TransformersModel) -> None:
    """Require that the folder contains the module's tensors under its own names, and no other state."""
    folder = Path(model.folder)
    entries = open_module(folder, model)
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in module.named_buffers()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    problems = compare_tensors(parameters, shapes, every | buffers, folder)
    if problems:
        hint = "transformers renames, splits or merges tensors of some types while loading, which is not supported"
        raise RecipeError([replace(problem, hint=hint) for problem in problems])
    held = sorted(name for name in buffers & set(entries) if name in module.state_dict())
    if not held:
        return
    stored = MappedTensors(entries)
    for name in held:
        if not torch.equal(module.get_buffer(name).float(), stored.read(name).float()):
            message = f"{folder} holds values in the buffer {name}, which are neither trained nor kept in checkpoints"
            raise RecipeError(Problem("unsupported", message, "init.from", "train it with `trainspec run`"))


# Trace the first block of each kind, between everything else. A part's memory is linear in the number of samples, so
# traces of two micro-batches suffice.


@dataclass
class _Figures:
    """Bytes of a part of the model in one trace, and the FLOPs of its forward pass."""

    kept: float
    forward: float
    flops: float
    backward: float = 0.0


class _Watch:
    """Measures the parts of a forward and a backward pass between marks."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.parts: list[_Figures] = []
        """`before`, the blocks, and `after`."""
        self.left: list[tuple[float, float]] = []
        """(peak above the bytes at the start, change of live bytes) for each part of the backward pass, in its
        order."""
        self._start()

    def _start(self) -> None:
        self.live = self.ledger.live_bytes
        self.ledger.peak_bytes = self.live
        self.flops = self.ledger.flops

    def mark_forward(self) -> None:
        ledger = self.ledger
        self.parts.append(
            _Figures(ledger.live_bytes - self.live, ledger.peak_bytes - self.live, ledger.flops - self.flops)
        )
        self._start()

    def mark_backward(self, *_gradient: Tensor) -> None:
        self.left.append((self.ledger.peak_bytes - self.live, self.ledger.live_bytes - self.live))
        self._start()

    def enter(self, _block: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not self.parts:
            self.mark_forward()
            self._at_gradient(args[0] if args else named["hidden_states"])

    def leave(self, _block: nn.Module, _args: Any, result: Any) -> None:
        self.mark_forward()
        self._at_gradient(result if isinstance(result, Tensor) else result[0])

    def _at_gradient(self, hidden: Tensor) -> None:
        if hidden.requires_grad:  # not if everything before it is frozen
            hidden.register_hook(self.mark_backward)


def _traced(model: TransformersModel, request: ModuleRequest) -> TransformersModel:
    whole = TransformersLanguageModel(model)
    forms = [
        (type(block).__name__, tuple(tuple(parameter.shape) for parameter in block.parameters()))
        for block in whole.block_modules()
    ]
    kinds = Counter(forms)
    firsts = [forms.index(kind) for kind in kinds]
    traces = {
        (recompute, samples): _trace(whole, model.block_list, request, firsts, recompute, samples)
        for recompute in RECOMPUTES
        for samples in (1, 2)
    }

    def numbers(place: int, recompute: Recompute = "none") -> tuple[float, ...]:
        one, two = (traces[recompute, samples][place] for samples in (1, 2))
        pairs = ((one.kept, two.kept), (one.forward, two.forward), (one.backward, two.backward))
        return tuple(number for first, second in pairs for number in (2 * first - second, second - first))

    def part(module: nn.Module, names: Iterable[str], place: int, **figures: Any) -> TracedPart:
        shapes = ("x".join(map(str, module.get_parameter(name).shape or (1,))) for name in names)
        flops = traces["none", 1][place].flops / request.seq_len
        return TracedPart(tuple(shapes), flops_per_token=flops, **figures)

    blocks = []
    for place, (first, count) in enumerate(zip(firsts, kinds.values(), strict=True), start=1):
        block = whole.block_modules()[first]
        linears = [(name.rpartition(".")[2], one) for name, one in block.named_modules() if isinstance(one, nn.Linear)]
        shown = tuple(f"{leaf} {one.out_features}x{one.in_features}" for leaf, one in linears)
        bytes_ = {recompute: numbers(place, recompute) for recompute in RECOMPUTES}
        names = [name for name, _ in block.named_parameters()]
        blocks.append(part(block, names, place, count=count, linears=shown, bytes_=bytes_))
    others = [name for name, _ in whole.named_parameters() if not name.startswith(whole.blocks_prefix)]
    ends = {"before": numbers(0), "after": numbers(len(firsts) + 1)}
    return replace(model, blocks=tuple(blocks), outside=part(whole, others, len(firsts) + 1, bytes_=ends))


def _trace(
    whole: TransformersLanguageModel,
    block_list: str,
    request: ModuleRequest,
    firsts: list[int],
    recompute: Recompute,
    samples: int,
) -> list[_Figures]:
    """Trace a forward and a backward pass of the module with only these blocks. Return the figures of everything before
    the blocks, of each block, and of everything after them."""
    part = copy.deepcopy(whole)
    with torch.device("meta"):
        apply_lora(part, request.lora)
    blocks = part.block_modules()
    owner, _, leaf = block_list.rpartition(".")
    setattr(part.module.get_submodule(owner), leaf, nn.ModuleList(blocks[first] for first in firsts))
    apply_recompute(part.block_modules(), recompute)
    ledger = Ledger()
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        part.to_empty(device=CPU)
        for parameter in part.parameters():
            parameter.data = parameter.data.to(FORMATS[request.compute])
        tokens = torch.zeros((samples, request.seq_len), dtype=torch.int64)
        watch = _Watch(ledger)
        for block in part.block_modules():
            block.register_forward_pre_hook(watch.enter, with_kwargs=True)
            block.register_forward_hook(watch.leave)
        loss = part(tokens, tokens)
        watch.mark_forward()
        loss.backward()
        watch.mark_backward()
    *_, after = watch.parts
    # What remains of the last part after its backward pass are gradients of parameters.
    after.backward, change = watch.left[0]
    for figures, (peak, _) in zip(reversed(watch.parts[1:-1]), watch.left[1:], strict=False):
        figures.backward = peak
    watch.parts[0].backward = change + after.kept
    return watch.parts
