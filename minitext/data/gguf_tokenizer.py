"""The tokenizer in a GGUF file's metadata, to and from the format of the `tokenizers` library.

A file names the way in which text is split into words (`tokenizer.ggml.pre`) and leaves the rest to llama.cpp. Four
ways are known here, all of byte-level byte-pair encoding.

Source: llama.cpp's `src/llama-vocab.cpp` and `convert_hf_to_gguf.py`.

Chapters: 23.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from minitext.errors import UserError

# llama.cpp's names, and of those with the newer expression, how many digits make a word.
DIGITS = {"gpt-2": None, "smollm": None, "llama-bpe": "{1,3}", "qwen2": ""}
DEFAULT = "default"  # an older name of the first
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
NO_MERGES = "\u00fe \u00ff"  # llama.cpp wants one pair of tokens: of two bytes that UTF-8 never has
SAMPLE = (
    "Hello, hello  WORLD!!\n\n\tI'll  can't WE'RE 1 12 1234 12345678 3.14x\r\n  \u00c4rger na\u00efve"
    " \u65e5\u672c\u8a9e \u0928\u092e\u0938\u094d\u0924\u0947"
    " \U0001f600\U0001f44d a_b=c;//d \u0663\u0664 \u2167 $5 'S 's   "
)


def read(said: Mapping[str, Any], where: str) -> tuple[str, int]:
    """Returns the tokenizer in the format of the `tokenizers` library, and the id that ends a text.

    Args:
      said: a file's metadata.
      where: the file, for messages.

    Raises:
      UserError: if it isn't byte-level byte-pair encoding with a way to split words that is known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", DEFAULT)
    split = "gpt-2" if split == DEFAULT else split
    if kind != "gpt2" or split not in DIGITS:
        raise UserError(
            f"{where} has the tokenizer {str(kind)[:40]}/{str(split)[:40]}, which isn't read: import the model's "
            "Hugging Face folder"
        )
    tokens, merges = said.get("tokenizer.ggml.tokens"), said.get("tokenizer.ggml.merges")
    eod = said.get("tokenizer.ggml.eos_token_id")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(eod, int):
        raise UserError(f"{where} has no vocabulary, merges or end of text: get the file again")
    kinds = said.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise UserError(
            f"{where} has {len(tokens)} tokens and {len(kinds)} types of tokens: get the file again"
        )
    used = {token: i for i, token in enumerate(tokens) if kinds[i] != UNUSED}
    pairs: list[Any] = [tuple(str(m).split(" ")) for m in merges if merges != [NO_MERGES]]
    around = {"bos": [], "eos": []}
    for name in around:
        # llama.cpp's own default.
        wanted = said.get(f"tokenizer.ggml.add_{name}_token", (name, split) == ("bos", "llama-bpe"))
        number = said.get(f"tokenizer.ggml.{name}_token_id")
        if wanted and isinstance(number, int) and 0 <= number < len(tokens):
            around[name] = [(tokens[number], number)]
    try:
        model = Tokenizer(models.BPE(used, pairs, ignore_merges=split == "llama-bpe"))
        model.pre_tokenizer = _splitter(split)
        model.decoder = decoders.ByteLevel()  # pyright: ignore
        for token, i in used.items():
            if kinds[i] in (CONTROL, USER_DEFINED):
                special = bool(kinds[i] == CONTROL)
                model.add_tokens([AddedToken(token, special=special, normalized=False)])
        if named := [*around["bos"], *around["eos"]]:
            before, after = ([name for name, _ in around[end]] for end in ("bos", "eos"))
            model.post_processor = processors.TemplateProcessing(  # pyright: ignore
                single=[*before, "$A", *after], special_tokens=named
            )
    except Exception as error:  # a bare Exception for merges that make no token
        raise UserError(f"{where} has merges that don't fit its vocabulary: {error}") from error
    return json.dumps(json.loads(model.to_str())), eod


def _splitter(split: str) -> Any:
    """Returns the part of a tokenizer that splits text into words."""
    from tokenizers import Regex, pre_tokenizers

    if (digits := DIGITS[split]) is None:
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if split == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )  # fmt: skip
        steps = [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    return pre_tokenizers.Sequence(steps)


def write(
    published: Mapping[str, Any],
    eod: int,
    vocab: int,
    special: Mapping[str, str],
    stops: Collection[int],
) -> dict[str, Any]:
    """Returns the metadata of a file for a tokenizer.

    Args:
      published: the content of tokenizer.json.
      eod: the id that ends a text.
      vocab: rows of the model's embedding; those without a token get one that nothing uses.
      special: name -> token, as `minitext.data.chat.special_tokens` returns them.
      stops: ids that end a model's turn.

    Raises:
      UserError: if it isn't byte-level byte-pair encoding, or splits words in a way that isn't known here.
    """
    from tokenizers import Tokenizer

    model, whole = published["model"], Tokenizer.from_str(json.dumps(published))
    if model.get("type") != "BPE" or not _is_of_bytes(published):
        raise UserError(
            "GGUF files are written with byte-level byte-pair encoding, and this tokenizer is another: use --format hf"
        )
    split = _split_of(whole, bool(model.get("ignore_merges")))
    added = {token["id"]: token for token in published.get("added_tokens") or ()}
    names = {i: token for token, i in whole.get_vocab(with_added_tokens=True).items()}
    if max(names) >= vocab:
        raise UserError(
            f"the tokenizer has the id {max(names)}, and the model has {vocab} tokens: import it again"
        )
    tokens, kinds = [], []
    for i in range(vocab):
        tokens.append(names.get(i, f"[UNUSED{i}]"))
        special_kind = CONTROL if added.get(i, {}).get("special") else USER_DEFINED
        kinds.append(UNUSED if i not in names else special_kind if i in added else NORMAL)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges or [NO_MERGES],
        "tokenizer.ggml.eos_token_id": eod,
    }  # fmt: skip
    before, after = _around(whole)
    for name, token in (("bos", before), ("eos", after)):
        fields[f"tokenizer.ggml.add_{name}_token"] = token is not None
    by_name = {token: i for i, token in names.items()}
    for key, name in (("bos", "bos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        if (token := special.get(name)) in by_name:
            fields[f"tokenizer.ggml.{key}_token_id"] = by_name[token]
    if before is not None:
        fields["tokenizer.ggml.bos_token_id"] = before
    if others := sorted(set(stops) - {eod}):
        fields["tokenizer.ggml.eot_token_id"] = others[-1]
    return fields


def _is_of_bytes(published: Mapping[str, Any]) -> bool:
    """Whether text is taken as it is, or composed (NFC), which llama.cpp leaves to the writer of the text."""
    normalizer = published.get("normalizer") or {}
    return (
        normalizer.get("type", "NFC") == "NFC"
        and (published.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _split_of(whole: Any, ignores_merges: bool) -> str:
    """Returns the name of a tokenizer's way to split words, found by what it does to a text that tells them apart."""
    if whole.pre_tokenizer is not None:
        mine = whole.pre_tokenizer.pre_tokenize_str(SAMPLE)
        for name in DIGITS:
            same = _splitter(name).pre_tokenize_str(SAMPLE) == mine
            if same and ignores_merges == (name == "llama-bpe"):
                return name
    raise UserError(
        f"the tokenizer splits text into words in none of the ways {', '.join(DIGITS)}: use --format hf"
    )


def _around(whole: Any) -> tuple[int | None, int | None]:
    """Returns the ids that a tokenizer puts before and after a text, or None."""
    bare = whole.encode("a", add_special_tokens=False).ids
    full = whole.encode("a").ids
    at = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    before, after = full[:at], full[at + len(bare) :]
    if len(before) > 1 or len(after) > 1:
        raise UserError(
            "the tokenizer puts several tokens before or after a text, and a GGUF file has one: use --format hf"
        )
    return (before or [None])[0], (after or [None])[0]


def special_tokens(said: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tokens with a meaning of their own that templates name, as in tokenizer_config.json."""
    tokens, found = said.get("tokenizer.ggml.tokens"), {}
    for theirs, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        number = said.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(tokens, list) and isinstance(number, int) and 0 <= number < len(tokens):
            found[name] = str(tokens[number])
    return found


def ends_of_turn(said: Mapping[str, Any]) -> list[int]:
    """Returns the ids of tokens that end a model's turn."""
    numbers = (said.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return [number for number in dict.fromkeys(numbers) if isinstance(number, int)]
