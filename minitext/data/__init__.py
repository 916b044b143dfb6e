"""Text to batches: sources, tokenizers, packing, order, and the position to resume from.

`make_batches` is the entry point. May import sharding, distributed and config.

Chapters: 7.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, make_batches="batches", Batches="batches", make_tokenizer="rows",
    load_tokenizer="tokenizer",
)  # fmt: skip
