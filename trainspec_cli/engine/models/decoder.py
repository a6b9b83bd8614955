"""A Llama-style decoder, dense or with experts.

Shapes: B samples, S tokens per sample, D hidden size, E rotary dimension of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.attention import Attention, MultiHeadLatentAttention
from trainspec_cli.engine.models.experts import MixtureOfExperts
from trainspec_cli.engine.models.language_model import LanguageModel
from trainspec_cli.engine.models.layers import FeedForward, make_norm
from trainspec_cli.engine.models.rope import rope_angles
from trainspec_cli.recipe.keys.model import DecoderModel, Rotation


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed-forward(norm(x)). Norms may also be applied to the
    outputs, and both may read the block's input (`recipe/keys/model.py`)."""

    def __init__(self, model: DecoderModel, layer: int):
        super().__init__()
        hidden = model.hidden_size
        attention = Attention if model.mla is None else MultiHeadLatentAttention
        of_attention, of_ffn = model.layer_norms
        self.rotation = model.rotation_of(layer)
        self.is_parallel = model.parallel_residual != "none"
        self.residual_scale = model.residual_scale
        self.attention_norm = make_norm(model, hidden) if of_attention.before else None
        self.attention = attention(model, model.window_of(layer), self.rotation)
        # The biases are added outside of attention and feed-forward, so that they are added only once if those are
        # spread over ranks and their outputs summed.
        self.attention_bias = nn.Parameter(torch.empty(hidden)) if model.attention_bias == "all" else None
        self.attention_out_norm = make_norm(model, hidden) if of_attention.after else None
        self.ffn_norm = make_norm(model, hidden) if of_ffn.before else None
        is_dense = not model.is_expert_layer(layer)
        self.ffn = dense_feed_forward(model) if is_dense else MixtureOfExperts(model)
        self.ffn_bias = nn.Parameter(torch.empty(hidden)) if model.mlp_bias and is_dense else None
        self.ffn_out_norm = make_norm(model, hidden) if of_ffn.after else None

    def forward(self, x_BSD: Tensor, *inputs: Tensor) -> Tensor:
        """`inputs`: as in `Decoder.block_inputs`."""
        normed_BSD = x_BSD if self.attention_norm is None else self.attention_norm(x_BSD)
        mixed_BSD = self.attention(normed_BSD, *_rotation(self.rotation, inputs))
        mixed_BSD = self._finish(mixed_BSD, self.attention_bias, self.attention_out_norm)
        if not self.is_parallel:
            x_BSD = normed_BSD = x_BSD + mixed_BSD
        if self.ffn_norm is not None:
            normed_BSD = self.ffn_norm(x_BSD)
        added_BSD = self._finish(self.ffn(normed_BSD), self.ffn_bias, self.ffn_out_norm)
        return x_BSD + mixed_BSD + added_BSD if self.is_parallel else x_BSD + added_BSD

    def _finish(self, y_BSD: Tensor, bias_D: Tensor | None, norm: nn.Module | None) -> Tensor:
        if bias_D is not None:
            y_BSD = y_BSD + bias_D
        if norm is not None:
            y_BSD = norm(y_BSD)
        return y_BSD if self.residual_scale == 1 else y_BSD * self.residual_scale


def _rotation(rotation: Rotation, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return a layer's cosines and sines, and the mask if there is one. Each pair of cosines and sines has two dims."""
    pairs = [one for one in inputs if one.dim() == 2]
    masks = inputs[len(pairs) :]
    if rotation == "none":
        return (None, None, *masks)
    return (*(pairs[2:] if rotation == "local" else pairs[:2]), *masks)


class PredictionBlock(Block):
    """A layer that predicts a further token (DeepSeek-V3, arXiv:2412.19437, eq. 21-23): a layer like the model's last
    one on a projection of hidden states and embeddings, and a norm before the common head."""

    def __init__(self, model: DecoderModel):
        super().__init__(model, model.num_layers - 1)
        self.embed_norm = make_norm(model, model.hidden_size)
        self.hidden_norm = make_norm(model, model.hidden_size)
        self.join = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.head_norm = make_norm(model, model.hidden_size)

    def forward(self, x_BSD: Tensor, embedded_BSD: Tensor, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        both = torch.cat((self.embed_norm(embedded_BSD), self.hidden_norm(x_BSD)), dim=-1)
        return self.head_norm(super().forward(self.join(both), *inputs))


def dense_feed_forward(model: DecoderModel) -> FeedForward:
    return FeedForward(
        *(model.hidden_size, model.ffn_size),
        gated=model.gated_mlp,
        activation=model.activation,
        bias=model.mlp_bias,
    )


class Decoder(LanguageModel):
    """A decoder. Queries and keys are rotated by position, or learned position embeddings are added to the token
    embedding."""

    positions_S: Tensor
    writes_per_layer: ClassVar[int] = 2

    def __init__(
        self,
        model: DecoderModel,
        seq_len: int,
        layers: range | None = None,
        make_block: Callable[[int], nn.Module] | None = None,
    ):
        super().__init__(model, layers, make_block or (lambda layer: Block(model, layer)))
        self.model = model
        self.seq_len = seq_len
        if self.norm is not None:
            self.norm = make_norm(model, model.hidden_size)
            self.logit_scale = model.logit_scale
        if self.loss is not None:
            self.loss.softcap = model.logit_softcap
        if self.loss is not None:
            self.prediction_layers = model.prediction_layers
            numbers = range(model.num_layers, model.num_layers + model.prediction_layers)
            self.blocks.update({str(number): PredictionBlock(model) for number in numbers})
        self.rotated_size = model.rotated_size
        self.position_embed = None
        if model.learned_positions and (layers is None or 0 in layers):
            self.position_embed = nn.Embedding(model.learned_positions, model.hidden_size)
        self._rotations = {"": (model.rope_theta, model.rope_scaling)} if model.rotates else {}
        if model.local_rope_theta is not None:
            self._rotations["local_"] = (model.local_rope_theta, None)
        for name in self._rotations:
            for part in ("cos", "sin"):
                self.register_buffer(f"{name}{part}_SE", torch.empty(seq_len, self.rotated_size), persistent=False)
        self.register_buffer("positions_S", torch.empty(seq_len, dtype=torch.int64), persistent=False)

    def prediction_loss(
        self, x_BSD: Tensor, tokens_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor | None
    ) -> Tensor:
        """Return the weighted mean loss of the prediction layers, summed over tokens (arXiv:2412.19437, eq. 24 and 25).
        Layer k reads the tokens k places ahead. The last k tokens of a sequence or a document have no targets."""
        head = self.head or self.embed
        assert head is not None and self.loss is not None
        inputs = self.block_inputs(x_BSD, documents_BS)
        losses = []
        blocks = list(self.blocks.values())[-self.prediction_layers :]
        for ahead, block in enumerate(blocks, start=1):
            is_cut_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) >= tokens_BS.shape[1] - ahead
            if documents_BS is not None:
                is_cut_S = is_cut_S | (documents_BS.roll(-ahead, 1) != documents_BS)
            further_BS = targets_BS.roll(-ahead, 1).masked_fill(is_cut_S, IGNORED_TARGET)
            x_BSD = block(x_BSD, self.embed_tokens(tokens_BS.roll(-ahead, 1)), *inputs)
            scaled_BSD = x_BSD * self.logit_scale if self.logit_scale != 1 else x_BSD
            losses.append(self.loss(scaled_BSD, head.weight, further_BS))
        return torch.stack(losses).mean() * self.model.prediction_loss_weight

    def embed_tokens(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = super().embed_tokens(tokens_BS)
        if self.model.embedding_scale != 1:
            x_BSD = x_BSD * self.model.embedding_scale
        if self.position_embed is None:
            return x_BSD
        return x_BSD + self.position_embed(self.positions_S[: tokens_BS.shape[1]])

    def block_inputs(self, x_BSD: Tensor, documents_BS: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return cosines and sines for this rank's positions (those of local layers follow if they differ) and, with
        documents, the attention mask."""
        if not self.model.rotates:
            return ()
        rotation = tuple(
            self.get_buffer(f"{name}{part}_SE")[self.positions_S].to(x_BSD.dtype)
            for name in self._rotations
            for part in ("cos", "sin")
        )
        if documents_BS is None:
            return rotation
        # A query attends to the keys of its document up to its own position.
        same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        return (*rotation, same_BSS.tril().unsqueeze(1))

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        if self.model.norm_offset and name.endswith("norm.weight"):
            full.zero_()
        else:
            super().init_parameter(name, full, generator)

    def init_buffers(self) -> None:
        super().init_buffers()
        torch.arange(self.seq_len, out=self.positions_S)
        for name, (theta, scaling) in self._rotations.items():
            angles = rope_angles(self.seq_len, self.rotated_size, theta, self.positions_S.device, scaling)
            both_SE = torch.cat((angles, angles), dim=-1)
            self.get_buffer(f"{name}cos_SE").copy_(both_SE.cos())
            self.get_buffer(f"{name}sin_SE").copy_(both_SE.sin())


build = Decoder
