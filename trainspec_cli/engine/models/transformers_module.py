"""A causal language model of the transformers package, which computes everything but the loss.

The engine's parallelism is applied to its blocks. The module stays in evaluation mode, so its dropout is off and a
step's result does not depend on the layout. Nothing is downloaded, and only `model.trust_remote_code` runs code of the
folder.

Shapes: B samples, S tokens per sample, T = B x S, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, TrainspecError
from trainspec_cli.data.huggingface.module_tensors import MODULE as PREFIX
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.models.language_model import PublishedModel, init_adapter
from trainspec_cli.engine.own_code import has_values
from trainspec_cli.recipe.keys.model import TransformersModel, loss_chunk_tokens
from trainspec_cli.recipe.keys.training import TARGETS, LoraSpec

LARGE_TENSOR = 2**27
"""Number of elements from which an uninitialised tensor is taken for a parameter."""
TRIAL_TOKENS = 8
AGREEMENT = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference between logits that should be equal, relative to the largest logit."""
AGREEMENT_ELSE = 1e-4


def make_module(model: TransformersModel) -> Any:
    """Build the module with its parameters on meta, in fp32, and all other tensors on the CPU, because the module's
    constructor may compute their values. Raises RecipeError if the installed transformers cannot."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    try:
        from transformers import (  # deferred: an optional package that takes seconds to load
            CONFIG_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
        )
        from transformers import __version__ as version
    except ImportError as error:
        message = "`model.backend` is transformers, but the package transformers is not installed"
        hint = "run pip install 'trainspec[transformers]'"
        raise MachineError(Problem("missing_package", message, "model.backend", hint)) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    described = json.loads(model.config)
    kind = described.pop("model_type", None)
    code = described.pop("auto_map", None)
    try:
        if code and model.trust_remote_code:
            config = AutoConfig.from_pretrained(model.folder, trust_remote_code=True, local_files_only=True)
            with _parameters_on_meta():
                built = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        elif kind in CONFIG_MAPPING:
            with _parameters_on_meta():
                built = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(described))
        else:
            known = f"transformers {version} does not know model_type {kind!r}"
            if code:
                message = f"{known}, and {model.folder} contains its code, which is not run without permission"
                hint = "read its Python files, then set model.trust_remote_code=true to run them with your permissions"
                raise RecipeError(Problem("untrusted_code", message, "model.trust_remote_code", hint))
            raise RecipeError(Problem("unsupported", known, "init.from", "install a newer transformers"))
    except TrainspecError:
        raise
    except Exception as error:  # whatever the code of a model type, or of the folder, raises
        message = f"transformers {version} cannot build the model of {model.folder or 'model.config'}: {error}"
        hint = "AutoModelForCausalLM.from_config must accept its config.json"
        raise RecipeError(Problem("unsupported", message, "init.from", hint)) from error
    for parameter in built.parameters():
        parameter.data = parameter.data.float()
    return built


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each new parameter to meta before it is initialised."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied parameter stays the same object
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        with torch.device("cpu"), _LargeOnMeta():
            yield
    finally:
        hook.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Creates large uninitialised tensors on meta, because a machine that only plans may not have the memory for the
    stacked matrices of all experts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})
        if func is torch.empty and result.numel() < LARGE_TENSOR:
            return func(*args, **(kwargs or {}))
        return result


def block_list(module: nn.Module) -> str:
    """Return the name of the list of modules with the most parameters outside any other list: the blocks."""
    lists = {name: held for name, held in module.named_modules() if isinstance(held, nn.ModuleList)}
    outermost = {name: held for name, held in lists.items() if not any(name.startswith(f"{one}.") for one in lists)}
    if not outermost:
        message = f"{type(module).__name__} has no list of blocks, so the engine cannot shard or recompute it"
        raise RecipeError(Problem("unsupported", message, "model.backend", "train it with `trainspec run`"))
    return max(outermost, key=lambda name: sum(one.numel() for one in outermost[name].parameters()))


class TransformersLanguageModel(PublishedModel):
    """Maps token IDs to the summed cross-entropy of the next tokens, or to logits."""

    loss: ClassVar[None] = None

    def __init__(self, model: TransformersModel):
        super().__init__()
        plain = make_module(model)
        self.module = copy.deepcopy(plain)
        for owner in self.module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to("meta"))
        self.blocks_prefix = f"{PREFIX}{model.block_list}."
        self.chunk = ChunkCrossEntropy()
        self._plain = (plain,)  # in a tuple, because it is not a part of this module
        self._with_values: tuple[tuple[str, int], nn.Module] | None = None
        self._is_tried = False
        self.train(False)

    def train(self, _mode: bool = True) -> TransformersLanguageModel:
        """Keep the evaluation mode, in which there is no dropout."""
        return super().train(False)

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor | None = None, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss (scalar, fp32) if targets are given, and logits (B, S, V) otherwise. With
        `documents_BS` (document numbers), each document has its own positions, by which transformers separates them.

        Raises RecipeError in the first call if the model lets tokens see later tokens or other documents."""
        if targets_BS is not None and not self._is_tried and has_values(tokens_BS.device):
            self._try(tokens_BS.device, documents=documents_BS is not None)
            self._is_tried = True
        samples = len(tokens_BS)
        if not samples:  # a rank whose samples are used up takes part in the exchanges
            tokens_BS = tokens_BS.new_zeros((1, tokens_BS.shape[1]))
            targets_BS = None if targets_BS is None else torch.full_like(tokens_BS, IGNORED_TARGET)
            documents_BS = None
        positions_BS = None if documents_BS is None else positions_in(documents_BS)
        logits_BSV = self._logits(tokens_BS, positions_BS)
        if targets_BS is None:
            return logits_BSV[:samples]
        loss: Tensor = _CrossEntropy.apply(self.chunk, logits_BSV.flatten(0, -2), targets_BS.flatten())
        return loss

    def _logits(self, tokens_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        logits_BSV: Tensor
        if positions_BS is not None:
            logits_BSV = self.module(input_ids=tokens_BS, position_ids=positions_BS, use_cache=False).logits
            return logits_BSV
        with _without_packing():
            logits_BSV = self.module(input_ids=tokens_BS, use_cache=False).logits
        return logits_BSV

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def _try(self, device: torch.device, *, documents: bool) -> None:
        """Check on a few random tokens that no token sees later ones and, if wanted, that the documents in a sample do
        not see each other. Raises RecipeError.

        transformers separates documents by their positions, in the masks that most but not all models use
        (`masking_utils.create_causal_mask`); state-space layers and ALiBi do not."""
        vocabulary = self.module.get_input_embeddings().num_embeddings
        ids = torch.randint(vocabulary, (1, 2 * TRIAL_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
        kind = f"{type(self.module).__name__} of transformers"

        def agree(one: Tensor, other: Tensor) -> bool:
            tolerance = AGREEMENT.get(one.dtype, AGREEMENT_ELSE) * max(1.0, float(other.abs().max()))
            return torch.allclose(one, other, rtol=0.0, atol=tolerance)

        if not agree(self._logits(ids)[:, :TRIAL_TOKENS], self._logits(ids[:, :TRIAL_TOKENS])):
            message = f"{kind} lets tokens see later tokens, so it cannot be trained to predict the next one"
            raise RecipeError(Problem("unsupported", message, "init.from", "name the folder of a causal model"))
        if not documents:
            return
        positions = torch.arange(TRIAL_TOKENS, device=device).repeat(2)[None]
        try:
            packed = self._logits(ids, positions)[:, TRIAL_TOKENS:]
            if agree(packed, self._logits(ids[:, TRIAL_TOKENS:])):
                return
            what = "lets documents in one sample see each other"
        except TypeError:
            what = "does not accept `position_ids`, by which documents are kept apart"
        message = f"{kind} {what}, and this data needs document masks"
        hint = "train on data without document masks (data=jsonl or data=text, data.document_masks=false)"
        raise RecipeError(Problem("unsupported", message, "data.document_masks", hint))

    def to_empty(self, *, device: Any, recurse: bool = True) -> TransformersLanguageModel:
        """Allocate the parameters; torch would separate those that are tied, unless they are sharded."""
        super().to_empty(device=device, recurse=recurse)
        if not isinstance(next(self.parameters()), DTensor):
            self.module.tie_weights()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters by name, tied ones under one of their names. Raises KeyError if one is missing."""
        missing = [name for name, _ in self.named_parameters() if name not in state_dict]
        if strict and missing:
            raise KeyError(", ".join(missing))
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def block_modules(self) -> Sequence[nn.Module]:
        return list(self.module.get_submodule(self.blocks_prefix.removeprefix(PREFIX).rstrip(".")))

    def compile_modules(self) -> Sequence[nn.Module]:
        return [*self.block_modules(), self.chunk]

    def adapted(self, leaf: str, spec: LoraSpec) -> bool:
        """Return whether a linear layer gets an adapter: those named in `lora.targets`, or all by default."""
        return spec.targets == TARGETS or leaf in spec.targets

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initialise the parameter as transformers does, from a random state that depends only on the seed and on the
        block, or the module outside the blocks, that the parameter belongs to."""
        if not init_adapter(name.rpartition(".")[2], full, generator) and has_values():
            place, name = self._place_of(name)
            full.copy_(self._filled(place, full.device).get_parameter(name))

    def init_buffers(self) -> None:
        for name, buffer in self.module.named_buffers() if has_values() else ():
            place, inside = self._place_of(PREFIX + name)
            buffer.copy_(self._filled(place, buffer.device).get_buffer(inside))
        self._with_values = None

    def _place_of(self, name: str) -> tuple[str, str]:
        """Return the block or module that is initialised together with a parameter, and the name inside it."""
        if name.startswith(self.blocks_prefix):
            number, _, inside = name.removeprefix(self.blocks_prefix).partition(".")
            return f"{self.blocks_prefix}{number}".removeprefix(PREFIX), inside
        owner, _, leaf = name.removeprefix(PREFIX).rpartition(".")
        return owner, leaf

    def _filled(self, place: str, device: torch.device) -> nn.Module:
        """Return a copy of a module with its initial values. Only one at a time is kept."""
        if self._with_values is None or self._with_values[0] != (place, self.seed):
            self._with_values = None
            (plain,) = self._plain
            is_block = f"{PREFIX}{place}.".startswith(self.blocks_prefix)
            module = copy.deepcopy(plain.get_submodule(place))
            # A parameter that only the module's constructor initialises remains NaN, which `load_initial` reports.
            module._apply(lambda one: _nan_like(one, device) if one.is_meta else one.to(device), recurse=is_block)
            digest = hashlib.sha256(f"{self.seed}/{place}".encode()).digest()
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                with torch.no_grad():
                    inside = [one for child in module.children() for one in child.modules()] if is_block else []
                    for one in (*reversed(inside), module):
                        if hasattr(one, "reset_parameters"):  # for modules that transformers does not initialise
                            one.reset_parameters()
                        plain._init_weights(one)
            self._with_values = (place, self.seed), module
        return self._with_values[1]


def _nan_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.full_like(tensor, torch.nan, device=device)


@contextmanager
def _without_packing() -> Iterator[None]:
    """Keep transformers from looking for packed documents in the positions, which waits for the device."""
    from transformers import masking_utils  # deferred: takes seconds to load

    def find_nothing(position_ids: Tensor) -> Tensor | None:
        return None

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find_nothing
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def positions_in(documents_BS: Tensor) -> Tensor:
    """Return each token's position in its document, given document numbers."""
    index_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return index_S - torch.where(starts_BS, index_S, 0).cummax(dim=1).values


class _CrossEntropy(torch.autograd.Function):
    """Returns the summed loss of logits. The gradient is computed in the forward pass, chunk by chunk, and is the only
    tensor that is kept."""

    @staticmethod
    def forward(ctx: Any, chunk: nn.Module, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        total = logits_TV.new_zeros((), dtype=torch.float32)
        dlogits_TV = logits_TV.clone()
        step = loss_chunk_tokens(logits_TV.shape[1])
        for start in range(0, len(targets_T), step):
            total += chunk(dlogits_TV[start : start + step], targets_T[start : start + step])[0]
        ctx.save_for_backward(dlogits_TV)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        (dlogits_TV,) = ctx.saved_tensors
        return None, dlogits_TV * scale.to(dlogits_TV.dtype), None


def build(model: TransformersModel, _seq_len: int, _layers: range | None) -> nn.Module:
    return TransformersLanguageModel(model)
