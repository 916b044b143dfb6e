"""Where text comes from: the standard library, local files, TensorFlow Datasets, Hugging Face.

Chapters: 7.
"""

import glob
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minitext import terminal
from minitext.config.data import CHATS, DataConfig
from minitext.data import text_files
from minitext.errors import UserError

BUILDERS = ("json", "parquet", "csv", "text", "arrow")  # of `datasets`, which read files
SAVED = ("dataset_dict.json", "state.json")  # in a folder that save_to_disk made
SAMPLE_BYTES = 16 << 20  # what a BPE tokenizer is trained on


def identity(cfg: DataConfig) -> list[Any]:
    """Returns JSON-able values that identify this source's text.

    For local text: each file's path, size and modification time; the files are not read.
    """
    if cfg.source == "mixture":
        return [[part.weight, identity(cfg.of_part(part))] for part in cfg.mixture]
    if cfg.source in ("grammar", "arrayrecord"):
        return [cfg.source, cfg.path]
    if cfg.source == "hf" or (cfg.source in CHATS and cfg.hf_name):
        name = [cfg.hf_name, cfg.hf_subset, cfg.hf_split, cfg.path, cfg.text_key]
        return name if cfg.source == "hf" else [*name, _stats(_files_of_hf(cfg))]
    if cfg.source == "tfds":
        records = open_tfds(cfg)
        # Has the version that was found; another data_dir may hold other records under the same name.
        name = records.dataset_info.full_name
        return [name, cfg.tfds_split, cfg.path, len(records), cfg.text_key]
    return [cfg.text_key, _stats(text_files.find_files(cfg))]


def identity_of_sample(cfg: DataConfig) -> list[Any]:
    """Returns JSON-able values that identify what `sample` yields, or for conversations what is said in them.

    Beside the text that is how it's read: the same files may hold texts and conversations. `identity` of a stream
    leaves out the times of local files, because saved positions have it and may move to another machine.
    """
    streamed = _stats(_files_of_hf(cfg)) if cfg.source == "hf" else []
    return [cfg.source, identity(cfg), streamed]


def _stats(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _files_of_hf(cfg: DataConfig) -> list[Path]:
    """Returns the local files that a Hugging Face dataset is read from; of one on the Hub, none."""
    if cfg.path:
        return [
            Path(name) for name in sorted(glob.glob(os.path.expanduser(cfg.path), recursive=True))
        ]
    found = Path(cfg.hf_name or "")
    return sorted(path for path in found.rglob("*") if path.is_file()) if found.is_dir() else []


def read(cfg: DataConfig) -> tuple[float, str, Iterator[tuple[text_files.Piece, float]]]:
    """Opens the whole text of a local source.

    Returns:
        Its size in bytes or records, a name for it, and its pieces, each with the size read so far.

    Raises:
        UserError: at once or while reading, if the text can't be read.
    """
    if cfg.source == "tfds":
        records = open_tfds(cfg)
        return len(records), f"{len(records):,} records", _tfds_pieces(cfg, records)
    sizes = _sizes(cfg)
    return sum(sizes.values()), f"{len(sizes):,} files", _file_pieces(cfg, sizes)


def _sizes(cfg: DataConfig) -> dict[Path, int]:
    return {path: path.stat().st_size for path in text_files.find_files(cfg)}


def _file_pieces(
    cfg: DataConfig, sizes: dict[Path, int]
) -> Iterator[tuple[text_files.Piece, float]]:
    before = 0
    for path, size in sizes.items():
        read = 0
        for piece in text_files.read_file(path, cfg.text_key):
            read += len(piece[0])
            yield piece, before + min(read, size)
        before += size


def _tfds_pieces(cfg: DataConfig, records: Any) -> Iterator[tuple[text_files.Piece, float]]:
    for number, read in enumerate(records):
        record = dict(read)
        where = f"data.tfds_name={cfg.tfds_name} record {number}"
        if isinstance(text := record.get(cfg.text_key), bytes):
            try:
                record[cfg.text_key] = text.decode()
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8: {error.reason}") from error
        if text := text_files.text_of(record, cfg.text_key, where):
            yield (text, True), number + 1


def sample(cfg: DataConfig, size: float = SAMPLE_BYTES) -> Iterator[str]:
    """Yields about 16 MiB of the source's text for a tokenizer to learn from.

    The sample takes the same share of every local file from its start, or the first records. A mixture is sampled by
    its weights.
    """
    if cfg.source == "mixture":
        whole = sum(part.weight for part in cfg.mixture)
        for part in cfg.mixture:
            yield from sample(cfg.of_part(part), size * part.weight / whole)
        return
    if cfg.source == "hf":
        parts = [((str(record.get(cfg.text_key, "")) for record in open_hf(cfg)), size)]
    elif cfg.source == "tfds":
        parts = [((text for (text, _), _ in _tfds_pieces(cfg, open_tfds(cfg))), size)]
    else:
        sizes = _sizes(cfg)
        share = min(1.0, size / max(1, sum(sizes.values())))
        parts = (
            ((text for text, _ in text_files.read_file(path, cfg.text_key)), share * length)
            for path, length in sizes.items()
        )
    done = 0
    with terminal.of_slow_work(size, "reading text for a BPE tokenizer") as advance_to:
        for texts, length in parts:
            for text in _take(texts, length):
                yield text
                done += len(text)
                advance_to(done)


def open_tfds(cfg: DataConfig) -> Any:
    """Opens a TensorFlow dataset, preparing it first if it isn't on disk.

    Returns:
        An iterable of dicts with a length and a `dataset_info`.

    Raises:
        UserError: the library isn't installed, or the dataset can't be opened.
    """
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.source=tfds needs {error.name}: pip install 'minitext[tfds]'"
        ) from error
    assert cfg.tfds_name, "checked by the config"
    folder = os.path.expanduser(cfg.path) if cfg.path else None
    try:
        builder: Any = tfds.builder(cfg.tfds_name, data_dir=folder)
        if not builder.is_prepared():
            # By itself it would write TFRecord files, and for that it needs TensorFlow.
            builder = tfds.builder(cfg.tfds_name, data_dir=folder, file_format="array_record")
            builder.download_and_prepare()
        if {found.value for found in builder.info.available_file_formats()} == {"tfrecord"}:
            return TFRecords(builder.info, cfg.tfds_split)
        return builder.as_data_source(split=cfg.tfds_split)
    except NotImplementedError as error:
        raise UserError(
            f"data.tfds_name={cfg.tfds_name} is on disk in a format that can't be read without TensorFlow: prepare it "
            f"in another folder, with: tfds build {cfg.tfds_name} --file_format=array_record --data_dir=FOLDER"
        ) from error
    except Exception as error:  # the library raises many kinds, all about the request
        raise _cannot_open(cfg, error, "tfds_name", "tfds_split", "path") from error


class TFRecords:
    """A split of a TensorFlow dataset in TFRecord files, which its own library reads only with TensorFlow.

    Grain's reader doesn't compare the records' checksums.

    Attributes:
        dataset_info: what TensorFlow Datasets knows of it.
    """

    def __init__(self, dataset_info: Any, split: str) -> None:
        """Finds the files; a split such as train[:10%] takes a part of some."""
        self.dataset_info = dataset_info
        self._parts = dataset_info.splits[split].file_instructions

    def __len__(self) -> int:
        return sum(part.take for part in self._parts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import grain
        from google.protobuf.message import DecodeError

        for part in self._parts:
            records = iter(grain.experimental.TFRecordIterDataset(part.filename))
            taken = itertools.islice(records, part.skip, part.skip + part.take)
            found = 0
            try:
                for record in taken:
                    found += 1
                    yield self.dataset_info.features.deserialize_example_np(record)
            except (OSError, ValueError, MemoryError, OverflowError, DecodeError) as error:
                raise UserError(f"cannot read {part.filename}: {_first_line(error)}") from error
            if found < part.take:
                raise UserError(
                    f"{part.filename} ends after {found:,} of {part.take:,} records: prepare it again"
                )


def open_hf(cfg: DataConfig) -> Any:
    """Opens a Hugging Face dataset as a stream, a `datasets.IterableDataset`, without reading records.

    Raises:
        UserError: there is no such dataset, or it can't be reached.
    """
    import datasets

    given: dict[str, Any] = {}
    if cfg.path:
        given["data_files"] = sorted(glob.glob(os.path.expanduser(cfg.path), recursive=True))
        if not given["data_files"]:
            raise UserError(f"data.path={cfg.path} does not exist: set it to a file or a glob")
    assert cfg.hf_name, "checked by the config"
    builds = cfg.path and cfg.hf_name in BUILDERS  # from the files, not of the Hub
    if not builds and not os.path.exists(cfg.hf_name):
        _check_hub(cfg.hf_name)
    try:
        if any((Path(cfg.hf_name) / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(cfg.hf_name)
            whole = saved[cfg.hf_split] if isinstance(saved, datasets.DatasetDict) else saved
            return whole.to_iterable_dataset()
        return datasets.load_dataset(
            cfg.hf_name, cfg.hf_subset, split=cfg.hf_split, streaming=True, **given
        )
    except Exception as error:  # the library raises many kinds, all about the request
        raise _cannot_open(cfg, error, "hf_name", "hf_subset", "hf_split") from error


def _check_hub(name: str) -> None:
    """Asks the Hub once for a dataset, because `datasets` would ask for half a minute and warn of every attempt.

    Raises:
        UserError: the Hub can't be reached, or has no such dataset.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        api.dataset_info(name, expand=["gated"], timeout=10)
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"data.hf_name={name} is not a dataset of {api.endpoint} that you may read: check the name; for a private "
            "one, log in with: hf auth login"
        ) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.HFValidationError):
        return  # `datasets` asks again, looks into its cache, or says what is wrong with the name
    except Exception as error:  # of the HTTP library, which differs between versions
        raise UserError(
            f"cannot look for data.hf_name={name}, because {api.endpoint} does not answer "
            f"({_first_line(error)}): check the network, or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error


def _cannot_open(cfg: DataConfig, error: Exception, *keys: str) -> UserError:
    given = {key: getattr(cfg, key) for key in keys if getattr(cfg, key) is not None}
    asked = " ".join(f"data.{key}={value}" for key, value in given.items())
    return UserError(f"cannot open {asked} ({_first_line(error).rstrip('.')}): name another")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _take(texts: Iterable[str], size: float) -> Iterator[str]:
    """Yields from `texts` up to about `size` characters, cutting the last one."""
    for text in texts:
        if size < 1:
            return
        yield text[: int(size)]
        size -= len(text)
