"""The data: text, tokenised once into token shards, or images and volumes, read in place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from trainspec_cli.recipe.field_types import Option, PositiveInt, Range


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE, trained on the data unless a file is named."""

    vocab_size: Annotated[int, Range(257)] = 4096
    """The size of the vocabulary that is trained."""
    path: str | None = None
    """A `tokenizer.json` of the `tokenizers` library; `vocab_size` is then that file's."""
    end_of_document: str | None = None
    """The token of that file that ends a document; null looks for a common name (`<|endoftext|>`, `</s>`, ...)."""
    code: str = ""
    """A tokenizer of one's own: `FILE.py:NAME`, `package.module:NAME`, or a name that a package registered."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments of one's own tokenizer, by name."""

    @property
    def is_trained(self) -> bool:
        """Return whether the tokenizer is made from the data."""
        return self.path is None and not self.code


Documents = Literal["python_stdlib", "text", "jsonl", "parquet", "arrow", "chat", "tokens", "nanogpt", "megatron"]


@dataclass(frozen=True)
class PartSpec:
    """One of several sources."""

    source: Documents | str
    path: str | None = None
    text_field: str = "text"
    weight: float = 1.0
    """Its share of the samples, over the sum of all parts' weights."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments of one's own code, by name."""

    @property
    def is_own(self) -> bool:
        """Return whether the documents come from the user's own code."""
        return self.source not in SOURCES


@dataclass(frozen=True)
class PhantomSpec:
    """Synthetic MR images; the same in every run, whatever its seed."""

    samples: PositiveInt = 1024
    """Training samples per epoch; held-out samples come on top."""


SampleSource = Literal["phantom", "images", "volumes"]
SAMPLE_SOURCES = get_args(SampleSource)
"""Sources of convolutional networks, whose samples are images or volumes. All other sources become tokens."""
SOURCES = (*get_args(Documents), "mixture", *SAMPLE_SOURCES)
"""The sources that ship with trainspec."""


@dataclass(frozen=True)
class DataSpec:
    seq_len: PositiveInt
    """Tokens per sample; 1 for images and volumes."""
    source: Literal[Documents, "mixture", SampleSource] | str
    """`tokens` is a folder that `trainspec data prepare` wrote; text is prepared at launch and cached.

    `arrow` is a Hugging Face dataset as `save_to_disk` writes it; `nanogpt` and `megatron` are files of token ids, read
    in place; `mixture` draws from several sources by weight.
    `chat` is conversations (`messages`, ShareGPT or Alpaca) or completions (`prompt`, `completion`), each file in one
    format: JSON lines, a JSON array, or a table.
    `images` is a folder with a sub-folder of pictures per class, `volumes` a folder of image and label pairs.
    One's own code that gives documents: `FILE.py:NAME`, `package.module:NAME`, or a name that a package registered.
    """
    path: str | None = None
    """File, folder or glob; python_stdlib and phantom need none."""
    text_field: str = "text"
    """The field of each JSON line, or the column of a table, that holds the text."""
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    """What turns text into tokens."""
    heldout_fraction: Annotated[float, Range(0, 1, includes_low=False, includes_high=False)] = 0.02
    """Fraction of the documents or samples (chosen by a hash of each) held out for evaluation."""
    max_bytes: PositiveInt | None = None
    """Read at most this much text."""
    phantom: PhantomSpec = field(default_factory=PhantomSpec)
    """The synthetic volumes (phantom only)."""
    document_masks: bool = False
    """Attention stays within each document of a sample; conversations are always kept apart."""
    chat_template: str | None = None
    """`chatml`, or a Jinja file; null: the one beside the tokenizer (chat only)."""
    loss_on: Literal["replies", "all"] = "replies"
    """The part of a conversation that is learnt: the assistant's replies, or all of it (chat only)."""
    mixture: dict[str, PartSpec] = field(default_factory=dict)
    """The sources by name (mixture only)."""
    validation: dict[str, PartSpec] = field(default_factory=dict)
    """Further evaluation texts by name, each used whole; their weights are ignored."""
    options: dict[str, Option] = field(default_factory=dict)
    """Arguments of one's own code, by name."""

    @property
    def is_own(self) -> bool:
        """Return whether the documents come from the user's own code."""
        return self.source not in SOURCES

    @property
    def masks_documents(self) -> bool:
        return self.document_masks or any(part.source == "chat" for part in self.parts.values())

    @property
    def parts(self) -> dict[str, PartSpec]:
        """The training sources by name."""
        if self.source == "mixture":
            return self.mixture
        return {"": PartSpec(self.source, self.path, self.text_field, options=self.options)}

    @property
    def own_parts(self) -> dict[str, PartSpec]:
        """The sources that are the user's own code, by the key that names it."""
        named = {f"data.mixture.{name}.source": part for name, part in self.mixture.items()}
        main = named if self.source == "mixture" else {"data.source": self.parts[""]}
        every = main | {f"data.validation.{name}.source": part for name, part in self.validation.items()}
        return {key: part for key, part in every.items() if part.is_own}

    def with_part(self, part: PartSpec) -> DataSpec:
        """Return the same data settings for one part alone."""
        one = {"source": part.source, "path": part.path, "text_field": part.text_field, "options": part.options}
        return replace(self, **one, mixture={}, validation={})  # type: ignore[arg-type]

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """The unit that a batch's loss is averaged over, and that speed is counted in."""
        return "samples" if self.source in SAMPLE_SOURCES else "tokens"
