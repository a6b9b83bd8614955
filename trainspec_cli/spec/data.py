"""What is read: text, which is tokenised once into token shards, or images and volumes, which are read as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TokenizerSpec:
    """A byte-level BPE, trained on the data when no file is named."""

    vocab_size: int = 4096
    path: str | None = None
    """A `tokenizer.json` of the `tokenizers` library; `vocab_size` is then that file's."""
    end_of_document: str | None = None
    """The token of that file that closes a document; null looks for a common name (`<|endoftext|>`, `</s>`, ...)."""


@dataclass(frozen=True)
class PhantomSpec:
    """Synthetic MR images made on the spot; the same for the same seed, whatever the run's own."""

    samples: int = 1024
    """To train on in an epoch; those held out are made beside them."""
    seed: int = 0


SAMPLE_SOURCES = ("phantom", "images", "volumes")
"""What convolutional networks read: a sample is one image or volume. All other sources become tokens."""


@dataclass(frozen=True)
class DataSpec:
    seq_len: int
    """Tokens a sample; 1 for images and volumes."""
    source: Literal["python_stdlib", "text", "jsonl", "chat", "tokens", "phantom", "images", "volumes"]
    """`tokens` is a folder that `trainspec data prepare` wrote; text is prepared on the spot and cached.

    `chat` is JSON lines of conversations (`messages`) or completions (`prompt`, `completion`).
    `images` is a folder with a sub-folder of pictures a class, `volumes` one of image and label pairs.
    """
    path: str | None = None
    """File, folder or glob; python_stdlib and phantom need none."""
    text_field: str = "text"
    """The field of each JSON line that holds the text (jsonl only)."""
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    heldout_fraction: float = 0.02
    """Part of the documents or samples (chosen by a hash of each) kept aside to be judged on."""
    max_bytes: int | None = None
    """Read at most this much text."""
    phantom: PhantomSpec = field(default_factory=PhantomSpec)
    document_masks: bool = False
    """Attention stays within documents, of which a sample may hold several; conversations are always kept apart."""
    chat_template: str | None = None
    """`chatml`, or a file of Jinja; null: the one that stands beside the tokenizer (chat only)."""
    loss_on: Literal["replies", "all"] = "replies"
    """What is learnt of a conversation: what the assistant says, or all of it (chat only)."""

    @property
    def masks_documents(self) -> bool:
        return self.document_masks or self.source == "chat"

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """What a batch's loss is the mean over, and what speed counts."""
        return "samples" if self.source in SAMPLE_SOURCES else "tokens"
