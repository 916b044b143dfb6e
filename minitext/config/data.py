"""The settings of the data: one source of text, or several mixed by weight.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from minitext.config.section import Section

Indexed = Literal["stdlib", "grammar", "files", "arrayrecord", "tfds"]


class MixturePart(Section):
    """One source of a mixture and its share of the rows."""

    weight: float = Field(gt=0, description="rows of this part, in proportion to the other weights")
    source: Indexed = Field(description="where the part's text comes from, as data.source")
    path: str | None = Field(default=None, description="as data.path")
    text_key: str = Field(default="text", description="as data.text_key")
    tfds_name: str | None = Field(default=None, description="as data.tfds_name")
    tfds_split: str = Field(default="train", description="as data.tfds_split")


class DataConfig(Section):
    """What text is read and how it becomes rows of tokens."""

    source: Literal["stdlib", "grammar", "files", "arrayrecord", "tfds", "hf", "mixture"] = Field(
        default="stdlib",
        description="Python's own library, a synthetic grammar, local files, packed files, TensorFlow Datasets, "
        "Hugging Face, or several of the first five",
    )
    mixture: tuple[MixturePart, ...] = Field(
        default=(),
        description="mixture: its parts, such as [{weight: 3, source: files, path: a}, {weight: 1, source: stdlib}]",
    )
    path: str | None = Field(
        default=None,
        description="files: a file, folder or glob of text; arrayrecord: the folder; tfds: the data_dir",
    )
    seq_len: int = Field(default=256, ge=2, le=2**24, description="tokens per row (T)")
    tokenizer: Literal["byte", "bpe"] = Field(
        default="byte", description="bytes, or byte-pair encoding trained on the source"
    )
    text_key: str = Field(
        default="text",
        description="field that holds the text in jsonl, parquet, tfds and Hugging Face records",
    )
    tfds_name: str | None = Field(
        default=None, description="tfds: dataset name, such as wiki40b/en or ag_news_subset:1.0.0"
    )
    tfds_split: str = Field(
        default="train", description="tfds: split, such as train or train[:10%]"
    )
    hf_name: str | None = Field(
        default=None, description="hf: dataset name, or parquet or json with data.path"
    )
    hf_subset: str | None = Field(default=None, description="hf: configuration of the dataset")
    hf_split: str = Field(default="train", description="hf: split of the dataset")
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of the rows held out for validation"
    )
    shuffle: bool = Field(
        default=True, description="whether training rows come in random order, new in every epoch"
    )
    epochs: int | None = Field(
        default=None, ge=1, description="passes over the training rows; null: as many as steps take"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the order of rows")

    def faults(self) -> Iterator[str]:
        """Yields a fault for a source that lacks its setting or has one that it cannot use."""
        if self.source == "files" and not self.path:
            yield "data.source=files needs data.path: set it to a file, a folder or a glob"
        if self.source == "arrayrecord" and not self.path:
            yield "data.source=arrayrecord needs data.path: set it to a folder that minitext data pack made"
        if self.source == "tfds" and not self.tfds_name:
            yield "data.source=tfds needs data.tfds_name: set it to a dataset's name, such as wiki40b/en"
        if self.source == "hf" and not self.hf_name:
            yield "data.source=hf needs data.hf_name: set it to a dataset's name, such as allenai/c4"
        if self.source == "grammar" and self.tokenizer != "byte":
            yield (
                f"data.tokenizer={self.tokenizer} does not go with data.source=grammar, whose entropy rate is "
                "computed per byte: set data.tokenizer=byte"
            )
        if self.source == "mixture" and not self.mixture:
            yield "data.source=mixture needs data.mixture: set it to a list of parts, each with weight and source"
        if self.source != "mixture" and self.mixture:
            yield f"data.mixture is set and data.source={self.source}: set data.source=mixture, or data.mixture=[]"
        if self.epochs is not None and self.source in ("grammar", "hf", "mixture"):
            yield (
                f"data.epochs={self.epochs} does not go with data.source={self.source}, whose rows have no common "
                "count: leave data.epochs out and set train.steps"
            )
        for number, part in enumerate(self.mixture):
            for fault in self.of_part(part).faults():
                yield f"data.mixture[{number}]: {fault}"

    def of_part(self, part: MixturePart) -> "DataConfig":
        """Returns the settings of a mixture's part as if it were the only source."""
        values = part.model_dump(exclude={"weight"})
        return self.model_copy(update={**values, "mixture": (), "epochs": None})
