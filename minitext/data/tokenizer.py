"""Text to token ids and back: UTF-8 bytes, byte-level byte-pair encoding, or what a published model came with.

The first two are lossless (`decode(encode(text)) == text` for any Unicode text), and have one id that no
text encodes to: the end-of-document id `eod_id`, the last of the vocabulary. A tokenizer saves itself
as one small JSON file, so a trained model works without its training text.

Chapters: 7.
"""

import functools
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitext import files
from minitext.errors import UserError

BYTES = 256
MOST_IDS = 1 << 24  # of a published tokenizer; the largest known have 2^18
END = "<|endoftext|>"  # our own end of a document, where another format needs a name for it


class Spelled(NamedTuple):
    """The ids of a text in which special tokens are spelled, and where they are.

    Attributes:
        ids: integer [n].
        starts: int64 [n], the first character of each token; tokens that share a character all have it.
        ends: int64 [n], one past its last character.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Tokenizer(ABC):
    """What the rest of the package asks of a tokenizer.

    Attributes:
        vocab_size: number of ids in use; every id is below it.
        eod_id: the id that ends a document; no text encodes to it.
        byte_ids: ids of bytes that are decoded a run at a time: one that isn't UTF-8 makes U+FFFD of every byte beside
            it (SentencePiece's byte fallback). Empty where each byte stands for itself.
        no_text: an id below `vocab_size` that no text encodes to and that isn't `eod_id`, free to mean
            padding; None if none is known.
    """

    vocab_size: int
    eod_id: int
    byte_ids: frozenset[int] = frozenset()
    no_text: int | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without an end-of-document id.

        Raises:
            UserError: `text` holds a lone surrogate, which is half a character.
        """

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns one integer array of ids per text: the fast way to encode a corpus."""

    def encode_rest(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the same of texts that don't begin a document but go on with one."""
        return self.encode_batch(texts)

    @abstractmethod
    def encode_spelled(self, texts: Sequence[str]) -> list[Spelled]:
        """Returns the ids of rendered conversations, in which special tokens are found where the text spells them.

        Nothing is added at the texts' ends: a chat template writes every token itself. Our own tokenizers have one
        special token, the end of a document, which is spelled as `END`.
        """

    def encode_chat(self, text: str) -> list[int]:
        """Returns the ids of one rendered conversation, as `encode_spelled` does."""
        return self.encode_spelled([text])[0].ids.tolist()

    @property
    @abstractmethod
    def spellings(self) -> dict[str, int]:
        """How `encode_spelled` finds the special tokens: spelling -> id."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; never raises, whatever a model has sampled.

        End-of-document ids are left out. Bytes that aren't UTF-8, and ids beyond the vocabulary (a
        model may have a larger one), become U+FFFD.
        """

    @abstractmethod
    def count_bytes(self, ids: np.ndarray) -> int:
        """Returns how many bytes of text the ids of a part of a text stand for; its ends may cut characters."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns the whole tokenizer as JSON-able values."""

    @abstractmethod
    def published(self) -> dict[str, Any]:
        """Returns the content of a tokenizer.json: the `tokenizers` library gives the same ids with it.

        There the id that ends a document is a special token, which text that spells it becomes.
        """

    def published_end(self) -> str:
        """Returns how `published` spells the token that ends a document."""
        from tokenizers import Tokenizer

        token = Tokenizer.from_str(json.dumps(self.published())).id_to_token(self.eod_id)
        assert token is not None, self.eod_id
        return token

    def save(self, path: str | Path) -> None:
        """Writes a JSON file for `load_tokenizer`, whole or not at all."""
        files.write(Path(path), json.dumps(self.to_json()))


class OwnTokenizer(Tokenizer):
    """What our own two kinds share: one special token, which text is cut at before it is encoded."""

    @property
    def spellings(self) -> dict[str, int]:
        """The end of a document alone."""
        return {END: self.eod_id}

    def encode_spelled(self, texts: Sequence[str]) -> list[Spelled]:
        """Encodes what is between the special tokens, and puts their ids there."""
        return [self._encode_spelled(text) for text in texts]

    def _encode_spelled(self, text: str) -> Spelled:
        found, at = [], 0
        for number, piece in enumerate(text.split(END)):
            if number:
                found.append(Spelled(*(np.array([n]) for n in (self.eod_id, at, at + len(END)))))
                at += len(END)
            ids, starts, ends = self._with_offsets(piece)
            found.append(Spelled(ids, starts + at, ends + at))
            at += len(piece)
        return Spelled(
            *(np.concatenate(arrays).astype(np.int64) for arrays in zip(*found, strict=True))
        )

    @abstractmethod
    def _with_offsets(self, text: str) -> Spelled:
        """Encodes a text without special tokens."""


class ByteTokenizer(OwnTokenizer):
    """Ids 0 to 255 are the bytes of the text's UTF-8, and 256 ends a document."""

    vocab_size = BYTES + 1
    eod_id = BYTES
    no_text: int = 255  # a byte that never occurs in UTF-8

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(_utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns a uint8 array for each text."""
        return [np.frombuffer(_utf8(text), np.uint8) for text in texts]

    def _with_offsets(self, text: str) -> Spelled:
        ids = np.frombuffer(_utf8(text), np.uint8)
        first = np.flatnonzero(
            (ids & 0xC0) != 0x80
        )  # the other bytes of a character begin with the bits 10
        character = np.repeat(np.arange(len(text)), np.diff(first, append=len(ids)))
        return Spelled(ids, character, character + 1)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`."""
        known = (i if 0 <= i < BYTES else self.no_text for i in map(int, ids) if i != self.eod_id)
        return bytes(known).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """Counts the ids that are bytes."""
        return int((np.asarray(ids) < BYTES).sum())

    def to_json(self) -> dict[str, Any]:
        """Returns `{"kind": "byte"}`."""
        return {"kind": "byte"}

    def published(self) -> dict[str, Any]:
        """Returns byte-pair encoding without a pair."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # GPT-2 writes the bytes that can't be printed as the characters from 256 on.
        printed = {*range(33, 127), *range(161, 256)} - {173}
        others = itertools.count(BYTES)
        vocabulary = {chr(b if b in printed else next(others)): b for b in range(BYTES)}
        model = Tokenizer(models.BPE(vocabulary, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
        model.decoder = decoders.ByteLevel()  # pyright: ignore
        return _with_end(model)


class BPETokenizer(OwnTokenizer):
    """Byte-level byte-pair encoding by the `tokenizers` library, with GPT-2's word splitting.

    The 256 bytes come first, then the merges in the order they were learned, then `eod_id`. The
    library doesn't know the end of document, or it would find it in text that spells it.

    Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019 (GPT-2).
    """

    def __init__(self, model: Any) -> None:
        """Wraps `model`, a `tokenizers.Tokenizer` trained by `train_bpe`."""
        self._model = model
        self.eod_id = model.get_vocab_size()
        self.vocab_size = self.eod_id + 1
        self.no_text: int = model.token_to_id("\u00ff")  # the entry of byte 255, see ByteTokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`."""
        _utf8(text)
        return self._model.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns a uint32 array for each text; the library encodes them on all cores."""
        for text in texts:
            _utf8(text)
        encodings = self._model.encode_batch_fast(list(texts))
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _with_offsets(self, text: str) -> Spelled:
        _utf8(text)
        return _spelled(self._model.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`."""
        known = [
            i if 0 <= i < self.eod_id else self.no_text for i in map(int, ids) if i != self.eod_id
        ]
        return self._model.decode(known, skip_special_tokens=False)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Adds up the tokens' lengths."""
        return int(self._lengths[np.asarray(ids)].sum())

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return _lengths(self._model, self.vocab_size)

    def to_json(self) -> dict[str, Any]:
        """Returns the vocabulary and the merges in the library's format."""
        return {"kind": "bpe", "bpe": json.loads(self._model.to_str())}

    def published(self) -> dict[str, Any]:
        """Returns the vocabulary, the merges and the end of a document."""
        from tokenizers import Tokenizer

        return _with_end(Tokenizer.from_str(self._model.to_str()))


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, in the format of the `tokenizers` library.

    Special tokens are found in text that spells them, as chat templates need it.
    """

    def __init__(self, model: Any, eod_id: int) -> None:
        """Wraps `model`, a `tokenizers.Tokenizer`; `eod_id` ends a document."""
        self._model, self.eod_id = model, eod_id
        vocabulary = model.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        if "ByteFallback" in repr(model.decoder):
            names = {f"<0x{byte:02X}>" for byte in range(BYTES)}
            self.byte_ids = frozenset(i for name, i in vocabulary.items() if name in names)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, after the token that the model expects at the beginning, if it expects one."""
        _utf8(text)
        return self._model.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns a uint32 array for each text, without special tokens at its ends."""
        for text in texts:
            _utf8(text)
        return _ids_alone(self._model, texts)

    def encode_rest(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the same without the space that many models put before a text."""
        for text in texts:
            _utf8(text)
        return _ids_alone(self._unprefixed, texts)

    @functools.cached_property
    def _unprefixed(self) -> Any:
        """The same tokenizer, which puts nothing before a text."""
        from tokenizers import Tokenizer

        whole = self.published()
        parts = {name: _unprefixed(whole[name]) for name in ("normalizer", "pre_tokenizer")}
        return Tokenizer.from_str(json.dumps(whole | parts))

    @functools.cached_property
    def spellings(self) -> dict[str, int]:
        """Those of its added tokens that are special; others, such as <think>, are words of a text."""
        added = self._model.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def encode_spelled(self, texts: Sequence[str]) -> list[Spelled]:
        """Encodes on all cores."""
        for text in texts:
            _utf8(text)
        return [_spelled(found) for found in self._exact.encode_batch(list(texts))]

    def encode_chat(self, text: str) -> list[int]:
        """Returns the same without offsets, for which no second tokenizer is made."""
        return self.encode_batch([text])[0].tolist()

    @functools.cached_property
    def _exact(self) -> Any:
        """The same tokenizer without what follows it, which adds tokens at the ends and shortens offsets."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps(self.published() | {"post_processor": None}))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids` without special tokens; ids beyond the vocabulary are left out."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._model.decode(known, skip_special_tokens=True)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Adds up the tokens' lengths, if they are of bytes, as `decode` has them; else counts those of the text."""
        if self._lengths is not None:
            return int(self._lengths[np.asarray(ids)].sum())
        text = self.decode(ids)
        # A character cut by an end decodes to U+FFFD: three bytes for one.
        return len(text.encode()) - 2 * text.count("\ufffd")

    @functools.cached_property
    def _lengths(self) -> np.ndarray | None:
        is_of_bytes = (self.published()["decoder"] or {}).get("type") == "ByteLevel"
        return _lengths(self._model, self.vocab_size) if is_of_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Returns the library's format and the id that ends a document."""
        return {
            "kind": "published",
            "eod_id": self.eod_id,
            "published": self.published(),
        }

    def published(self) -> dict[str, Any]:
        """Returns what was read."""
        return json.loads(self._model.to_str())


def _lengths(model: Any, vocab_size: int) -> np.ndarray:
    """Returns each id's bytes of text, int64 [vocab_size]; `model` is byte-level, so a token has a letter for each."""
    found, added = np.zeros(vocab_size, np.int64), model.get_added_tokens_decoder()
    for token, i in model.get_vocab().items():
        if i not in added:
            found[i] = len(token)
        elif not added[i].special:
            found[i] = len(token.encode())
    return found


def _ids_alone(model: Any, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = model.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def _unprefixed(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a normalizer or pre-tokenizer of a tokenizer.json that puts nothing before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    if "normalizers" in part:
        found = map(_unprefixed, part["normalizers"])
        return part | {"normalizers": [one for one in found if one]}
    if "pretokenizers" in part:  # of which the first sees the text, and the others its words
        found = part["pretokenizers"]
        return part | {"pretokenizers": [*map(_unprefixed, found[:1]), *found[1:]]}
    changes = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    return part | changes.get(part["type"], {})


def _spelled(encoding: Any) -> Spelled:
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    return Spelled(np.array(encoding.ids, np.int64), starts, ends)


def _with_end(model: Any) -> dict[str, Any]:
    model.add_special_tokens([END])
    return json.loads(model.to_str())


def read_published(text: str, eod: str | int, where: str) -> PublishedTokenizer:
    """Returns the tokenizer of a published model.

    Args:
        text: the content of tokenizer.json.
        eod: the token that ends a document, or its id.
        where: it comes from, for messages.

    Raises:
        UserError: the library can't read it, or it lacks the token.
    """
    from tokenizers import Tokenizer

    try:
        model = Tokenizer.from_str(text)
    except Exception as error:  # a bare Exception for unknown JSON
        raise UserError(
            f"{where} is not a tokenizer that the tokenizers library reads: {error}"
        ) from error
    last, largest = max(model.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if largest >= MOST_IDS:  # the library goes through all ids below it when it saves
        raise UserError(
            f"{where} gives the token {files.shorten(last)!r} the id {largest}, and {MOST_IDS - 1} is the limit: get "
            "the file again"
        )
    model.no_truncation()
    model.no_padding()
    found = model.token_to_id(eod) if isinstance(eod, str) else eod
    if found is None or not 0 <= found < 2**31 or model.id_to_token(found) is None:
        raise UserError(
            f"{where} has no token {eod!r}, which should end a text: correct eos_token in tokenizer_config.json, or "
            "eos_token_id in config.json"
        )
    return PublishedTokenizer(model, found)


def train_bpe(texts: Iterable[str], vocab: int) -> BPETokenizer:
    """Learns byte-pair merges from `texts`.

    Args:
        texts: the text to count pairs in, in pieces of any length.
        vocab: the largest number of ids, including `eod_id`; texts with too few pairs give fewer.

    Returns:
        The tokenizer; the same texts always give the same one.

    Raises:
        UserError: `vocab` leaves no room for a merge.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab < BYTES + 2:
        raise UserError(
            f"model.vocab={vocab} is too small for data.tokenizer=bpe, which needs 256 bytes, an "
            f"end of document and one merge: set model.vocab to {BYTES + 2} or more"
        )
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    model.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return BPETokenizer(model)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer that `save` wrote.

    Raises:
        UserError: the file is missing or isn't a saved tokenizer.
    """
    path = Path(path)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["kind"] == "byte":
            return ByteTokenizer()
        if saved["kind"] == "published":
            return read_published(json.dumps(saved["published"]), saved["eod_id"], str(path))
        from tokenizers import Tokenizer

        return BPETokenizer(Tokenizer.from_str(json.dumps(saved["bpe"])))
    except OSError as error:
        raise UserError(
            f"cannot read the tokenizer {path}: {error.strerror}: copy it again, or the whole run"
        ) from error
    except Exception as error:  # `tokenizers` raises a bare Exception for unknown JSON
        raise UserError(
            f"{path} is not a tokenizer saved by minitext ({files.shorten(str(error))}): copy it again"
        ) from error


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}, which is half a character and has no UTF-8: remove it, or read the "
            "text with errors='replace'"
        ) from error
