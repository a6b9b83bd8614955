"""The base class of language models: embedding, blocks, norm, head and loss, as a full model or a pipeline stage.

Shapes: B samples, S tokens per sample, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainspec_cli.engine.models.attention import Attention, MultiHeadLatentAttention
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.engine.models.experts import MixtureOfExperts, Router
from trainspec_cli.engine.models.layers import BatchNorm, FeedForward, NormOverHeads, RMSNorm
from trainspec_cli.engine.models.lora import QuantisedWeight
from trainspec_cli.engine.models.mamba2 import Mamba2, init_scan
from trainspec_cli.recipe.keys.model import OwnModel, TextModel, embeds_at_both_ends
from trainspec_cli.recipe.keys.training import LoraSpec

INIT_STD = 0.02


class PublishedModel(nn.Module):
    """A model that declares which modules each technique (such as sharding) applies to, and along which dims parameters
    may be split."""

    tensor_cuts: ClassVar[dict[str, int]] = {}
    """Maps name patterns to the dim along which tensor parallelism splits a parameter. The first matching pattern
    applies."""
    tensor_partial: ClassVar[tuple[str, ...]] = ()
    """Parameters that are inside regions but not split, so a rank's gradient is only a partial sum."""
    prediction_layers: int = 0
    """Number of blocks of this stage, the last ones, that predict further tokens."""
    seed: int = 0
    """The run's seed, for initial values that are generated for several parameters together."""
    blocks_prefix: str = "blocks."
    """First part of the names of the blocks' parameters."""

    def adapted(self, leaf: str, spec: LoraSpec) -> bool:
        """Return whether a linear layer of a block, by the last part of its name, gets an adapter."""
        return leaf in spec.targets

    def block_modules(self) -> Sequence[nn.Module]:
        """Return the modules that are each sharded and recomputed as a unit."""
        raise NotImplementedError

    def compile_modules(self) -> Sequence[nn.Module]:
        """Return the modules that are each compiled as a unit; code between them remains eager."""
        return self.block_modules()

    def head_norms(self) -> Mapping[str, NormOverHeads]:
        """Return the norms that cover all heads together, of which tensor parallelism gives each rank a part."""
        return {name: module for name, module in self.named_modules() if isinstance(module, NormOverHeads)}

    def norm_modules(self) -> Sequence[BatchNorm]:
        """Return the modules whose statistics are computed over the samples of all ranks."""
        return self.all_of(BatchNorm)

    def region_modules(self) -> Sequence[nn.Module]:
        """Return the modules whose matrices tensor parallelism splits; these need the full input, and their outputs are
        summed. Routed experts are not included: they are spread over ranks without being split.
        """
        return self.all_of(Attention, MultiHeadLatentAttention, FeedForward, Mamba2)

    def attention_modules(self) -> Sequence[nn.Module]:
        """Return the attention modules, whose `core` mixes tokens along the sequence."""
        return self.all_of(Attention, MultiHeadLatentAttention)

    def expert_modules(self) -> Sequence[nn.Module]:
        """Return the mixture-of-experts modules.

        Each has `experts`, whose parameters have the expert as the first dim, and `dispatch`, which exchanges tokens.
        """
        return self.all_of(MixtureOfExperts)

    def balance_modules(self) -> Sequence[Router]:
        """Return the routers.

        Each router counts `tokens_per_expert_E` until `update_balance(counts_E)` is called with the global batch's
        counts. `loss_scale` (1 / global tokens) must be set before a step.
        """
        return self.all_of(Router)

    def all_of(self, *kinds: type[nn.Module]) -> list[Any]:
        return [module for module in self.modules() if isinstance(module, kinds)]


def init_adapter(leaf: str, full: Tensor, generator: torch.Generator) -> bool:
    """Initialise a half of an adapter, whose product is 0 at first. Return whether the parameter belongs to an adapter;
    magnitudes are set once the matrices have values (`start_magnitudes`)."""
    if leaf.endswith("lora_a"):
        # Uniform with variance 1 / 3D for D inputs, as in other LoRA implementations. Experts' are (E, D, R).
        bound = 1 / math.sqrt(full.shape[1])
        full.uniform_(-bound, bound, generator=generator)
    elif leaf.endswith("lora_b"):
        full.zero_()
    return leaf.endswith(("lora_a", "lora_b", "lora_m"))


class LanguageModel(PublishedModel):
    """Maps token IDs to the summed cross-entropy of the next tokens (or to logits, for generation).

    A pipeline stage holds some of the layers. The first stage embeds tokens; all other stages take hidden states. The
    last stage returns the loss; all other stages return hidden states.
    """

    tensor_cuts: ClassVar[dict[str, int]] = {
        "embed.weight": 0,
        "head.weight": 0,
        "blocks.*.attention.[qkv].weight": 0,
        "blocks.*.attention.[qkv].bias": 0,
        "blocks.*.attention.kv.weight": 0,
        "blocks.*.attention.sinks": 0,
        "blocks.*.attention.[qkv].lora_[bm]": 0,
        "blocks.*.attention.out.weight": 1,
        "blocks.*.attention.out.lora_a": 1,
        "blocks.*.ffn.gate.bias": 0,
        "blocks.*.ffn.up.bias": 0,
        "blocks.*.ffn.gate.weight": 0,
        "blocks.*.ffn.up.weight": 0,
        "blocks.*.ffn.down.weight": 1,
        "blocks.*.ffn.gate.lora_[bm]": 0,
        "blocks.*.ffn.up.lora_[bm]": 0,
        "blocks.*.ffn.down.lora_a": 1,
        "blocks.*.ffn.shared.gate.lora_[bm]": 0,
        "blocks.*.ffn.shared.up.lora_[bm]": 0,
        "blocks.*.ffn.shared.down.lora_a": 1,
        "blocks.*.ffn.shared.gate.weight": 0,
        "blocks.*.ffn.shared.up.weight": 0,
        "blocks.*.ffn.shared.down.weight": 1,
        "blocks.*.ffn.shared.gate.nf4_[cm]*": 0,
        "blocks.*.ffn.shared.up.nf4_[cm]*": 0,
        "blocks.*.ffn.shared.down.nf4_[cm]*": 1,
        "blocks.*.attention.[qkv].nf4_[cm]*": 0,
        "blocks.*.attention.kv.nf4_[cm]*": 0,
        "blocks.*.attention.out.nf4_[cm]*": 1,
        "blocks.*.ffn.gate.nf4_[cm]*": 0,
        "blocks.*.ffn.up.nf4_[cm]*": 0,
        "blocks.*.ffn.down.nf4_[cm]*": 1,
        "blocks.*.mamba.out.weight": 1,
        "blocks.*.mamba.*": 0,
    }
    tensor_partial: ClassVar[tuple[str, ...]] = (
        "blocks.*.attention.*_norm.*",
        "blocks.*.attention.*_down.weight",
        "blocks.*.lora_[abm]",
    )
    writes_per_layer: ClassVar[int]
    """Number of times that a layer adds to the residual stream."""

    def __init__(self, model: TextModel | OwnModel, layers: range | None, make_block: Callable[[int], nn.Module]):
        super().__init__()
        layers = range(model.num_layers) if layers is None else layers
        first = 0 in layers
        last = model.num_layers - 1 in layers
        embeds = first or (last and embeds_at_both_ends(model))
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size) if embeds else None
        self.blocks = nn.ModuleDict({str(layer): make_block(layer) for layer in layers})
        self.norm: nn.Module | None = RMSNorm(model.hidden_size, eps=model.norm_eps) if last else None
        self.logit_scale = 1.0
        self.head = None
        if last and not model.tied_embeddings:
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.loss: LinearCrossEntropy | None = LinearCrossEntropy() if last else None
        self.residual_std = INIT_STD / math.sqrt(self.writes_per_layer * model.num_layers)

    def forward(
        self,
        tokens_or_x: Tensor,
        targets_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        tokens_BS: Tensor | None = None,
    ) -> Tensor:
        """Run the model or stage. With `documents_BS` (document numbers), attention is limited to each document.
        Prediction layers on another stage than the first need `tokens_BS`.

        Return hidden states (B, S, D) unless this is the last stage. The last stage returns the summed loss (scalar,
        fp32) if targets are given, and logits (B, S, V) otherwise.
        """
        x_BSD = tokens_or_x if tokens_or_x.is_floating_point() else self.embed_tokens(tokens_or_x)
        inputs = self.block_inputs(x_BSD, documents_BS)
        blocks = list(self.blocks.values())
        for block in blocks[: len(blocks) - self.prediction_layers]:
            x_BSD = block(x_BSD, *inputs)
        if self.norm is None or self.loss is None:
            return x_BSD
        head = self.head or self.embed
        assert head is not None, "in a tied model, the last stage also holds the embedding"
        x_BSD = self.norm(x_BSD)
        result = self.loss(x_BSD * self.logit_scale if self.logit_scale != 1 else x_BSD, head.weight, targets_BS)
        if self.prediction_layers and targets_BS is not None and torch.is_grad_enabled():
            tokens_BS = tokens_BS if tokens_or_x.is_floating_point() else tokens_or_x
            assert tokens_BS is not None
            # The value of the result stays the loss of the next token, which other runs can be compared with.
            further = self.prediction_loss(x_BSD, tokens_BS, targets_BS, documents_BS)
            result = result + (further - further.detach())
        return result

    def prediction_loss(
        self, x_BSD: Tensor, tokens_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor | None
    ) -> Tensor:
        """Return the weighted loss of the prediction layers, summed over tokens."""
        raise NotImplementedError

    def embed_tokens(self, tokens_BS: Tensor) -> Tensor:
        assert self.embed is not None, "only the first stage takes tokens"
        return self.embed(tokens_BS)

    def block_inputs(self, _x_BSD: Tensor, documents_BS: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the inputs of every block in addition to the hidden states."""
        assert documents_BS is None, "a scan cannot stop at documents' ends; such recipes are rejected before launch"
        return ()

    def block_modules(self) -> Sequence[nn.Module]:
        return list(self.blocks.values())

    def compile_modules(self) -> Sequence[nn.Module]:
        return [*self.blocks.values(), *([self.loss.chunk] if self.loss else [])]

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Set norms to 1, biases to 0, matrices to Normal(0, 0.02), and the parameters of a scan as in Mamba-2.

        Matrices that write to the residual stream are divided by the square root of the number of such matrices
        (GPT-2).
        """
        leaf = name.rpartition(".")[2]
        if ".mamba." in name and init_scan(name.partition(".mamba.")[2], full, generator):
            return
        if init_adapter(leaf, full, generator):
            return
        if leaf.endswith("bias"):
            full.zero_()
        elif full.dim() == 1 and leaf != "sinks":
            full.fill_(1.0)
        else:
            into_residual = name.endswith(("out.weight", "down.weight", "experts.down"))
            full.normal_(0.0, self.residual_std if into_residual else INIT_STD, generator=generator)

    def init_buffers(self) -> None:
        for module in self.all_of(Router, QuantisedWeight):
            module.init_buffers()
