"""The data section: one source of text, or a weighted mixture.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from minitext.config.section import OptionalPath, Section, setting
from minitext.files import shorten

Indexed = Literal["stdlib", "grammar", "files", "arrayrecord", "tfds"]

CHATS = ("conversations", "preferences", "prompts")

READ_BY = {  # key -> the sources that read it
    "path": ("files", "arrayrecord", "tfds", "hf", *CHATS),
    "tfds_name": ("tfds",),
    "hf_name": ("hf", *CHATS),
    "chat_template": CHATS,
}

NEEDS = {  # source -> the key it can't do without, and what to set it to
    "files": ("path", "a file, a folder or a glob"),
    "arrayrecord": ("path", "a folder that minitext data pack made"),
    "tfds": ("tfds_name", "a dataset's name, such as wiki40b/en"),
    "hf": ("hf_name", "a dataset's name, such as allenai/c4"),
    "mixture": ("mixture", "a list of parts, each with weight and source"),
}


class MixturePart(Section):
    """One source of a mixture and its share of the rows."""

    weight: float = Field(gt=0, description="share of the rows, relative to the other weights")
    source: Indexed = Field(description="as data.source")
    path: OptionalPath = setting(None, "as data.path")
    text_key: str = setting("text", "as data.text_key")
    tfds_name: str | None = setting(None, "as data.tfds_name")
    tfds_split: str = setting("train", "as data.tfds_split")


class DataConfig(Section):
    """Which text is read and how it becomes rows of tokens."""

    source: Literal[
        "stdlib", "grammar", "files", "arrayrecord", "tfds", "hf", "mixture", "conversations", "preferences",
        "prompts",
    ] = setting(
        "stdlib",
        "Python's library, synthetic grammar, local files, packed files, TensorFlow Datasets, Hugging Face, a mixture, "
        "conversations (loss on the assistant's words), pairs of a chosen and a rejected answer, prompts to answer",
    )  # fmt: skip
    mixture: tuple[MixturePart, ...] = setting(
        (),
        "mixture: parts such as [{weight: 3, source: files, path: a}, {weight: 1, source: stdlib}]",
    )
    path: OptionalPath = setting(
        None,
        "files: a file, folder or glob of text; conversations, preferences, prompts: of .jsonl or .parquet; "
        "arrayrecord: the folder; tfds: the data_dir",
    )
    seq_len: int = setting(256, "tokens per row (T)", ge=2, le=2**24)
    tokenizer: Literal["byte", "bpe"] = setting("byte", "bytes, or BPE trained on the source")
    text_key: str = setting("text", "text field of jsonl, parquet, tfds and Hugging Face records")
    tfds_name: str | None = setting(None, "tfds: dataset, such as ag_news_subset:1.0.0")
    tfds_split: str = setting("train", "tfds: split, such as train or train[:10%]")
    hf_name: str | None = setting(
        None,
        "hf, conversations, preferences, prompts: dataset name, or parquet or json with data.path",
    )
    hf_subset: str | None = setting(None, "hf: configuration of the dataset")
    hf_split: str = setting("train", "hf: split of the dataset")
    chat_template: OptionalPath = setting(
        None,
        "conversations, preferences, prompts: file with a chat template; null: the model's, or a plain one",
    )
    too_long: Literal["drop", "cut"] = setting(
        "drop",
        "conversations that are longer than a row: left out and counted, or cut at their end",
    )
    validation_fraction: float = setting(0.05, "share of rows held out for validation", gt=0, lt=1)
    shuffle: bool = setting(True, "shuffle the training rows, in a new order every epoch")
    epochs: int | None = setting(None, "passes over the training rows; null: no limit", ge=1)
    seed: int = setting(0, "seed of the order of rows", ge=0, lt=2**31)

    def problems(self) -> Iterator[str]:
        """Checks that the source has the settings it needs and none it can't use."""
        key, example = NEEDS.get(self.source, ("source", ""))
        if self.source in CHATS and not (self.path or self.hf_name):
            yield (
                f"data.source={self.source} needs {self.source}: set data.path to a .jsonl or .parquet, or "
                "data.hf_name to a dataset's name"
            )
        if self.too_long == "cut" and self.source != "conversations":
            yield (
                f"data.too_long=cut has no effect with data.source={self.source}: set data.source=conversations, or "
                "data.too_long=drop"
            )
        if not getattr(self, key):
            yield f"data.source={self.source} needs data.{key}: set it to {example}"
        for key, sources in READ_BY.items():
            if getattr(self, key) is not None and self.source not in sources:
                yield (
                    f"data.{key}={shorten(getattr(self, key))} has no effect with data.source={self.source}: set "
                    f"data.source={' or '.join(sources)}"
                )
        if self.source == "grammar" and self.tokenizer != "byte":
            yield (
                f"data.tokenizer={self.tokenizer} does not work with data.source=grammar, whose entropy rate is "
                "computed per byte: set data.tokenizer=byte"
            )
        if self.source != "mixture" and self.mixture:
            yield f"data.mixture is set and data.source={self.source}: set data.source=mixture, or data.mixture=[]"
        if self.epochs is not None and self.source in ("grammar", "hf", "mixture"):
            yield (
                f"data.epochs={self.epochs} does not work with data.source={self.source}, whose rows have no common "
                "count: leave data.epochs out and set train.steps"
            )
        for number, part in enumerate(self.mixture):
            for problem in self.of_part(part).problems():
                yield f"data.mixture[{number}]: {problem}"

    def of_part(self, part: MixturePart) -> "DataConfig":
        """Returns the settings of a mixture's part as if it were the only source."""
        values = part.model_dump(exclude={"weight"})
        return self.model_copy(update={**values, "mixture": (), "epochs": None})
