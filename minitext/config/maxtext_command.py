"""What a command line, a script or a configuration file of MaxText sets, and for which machine.

The words `key=value` of the command that trains, `python3 -m maxtext.trainers.pre_train.train base.yml ...`, are read
wherever it is: on a line of its own, in a script with variables, or in the `--command` of `xpk workload create`, whose
device type and slices are read too. Nothing is run. A file's `base_config` is read before it. A program for
post-training has a file of its own (`sft.yml`, `dpo.yml`, `rl.yml`), which it reads if the command names none.

Chapters: 27.
"""

import ast
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.config import maxtext_model, yaml_text
from minitext.config.sections import XLA_OPTION
from minitext.errors import UserError

LIMIT = 1 << 20  # characters of a command or a file
DEPTH = 8  # files below one another, and texts inside texts
UP = 5  # folders above a file in which its base may be

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")
DEVICE = (
    "device-type",
    "device_type",
    "tpu-type",
    "tpu_type",
    "accelerator-type",
    "accelerator_type",
)
SLICES = ("num-slices", "num_slices")
NODES = ("num-nodes", "num_nodes")  # of GPUs
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")
# What MaxText's own files set over base.yml.
FILES: dict[str, dict[str, Any]] = {
    "base.yml": {},
    "sft.yml": {
        "use_sft": True, "learning_rate": 2e-5, "dataset_type": "hf", "sft_train_on_completion_only": True,
        "hf_path": "HuggingFaceH4/ultrachat_200k", "train_split": "train_sft", "train_data_columns": ["messages"],
    },
    "dpo.yml": {
        "use_dpo": True, "model_name": "qwen3-0.6b", "dataset_type": "hf", "hf_path": "Anthropic/hh-rlhf",
        "train_data_columns": ["chosen", "rejected"], "packing": False, "learning_rate": 5e-7,
        "per_device_batch_size": 2.0, "steps": 10, "max_target_length": 512, "gradient_clipping_threshold": 10.0,
        "dpo.dpo_beta": 0.1, "dpo.dpo_label_smoothing": 0.0,
    },
    "rl.yml": {
        "rl.num_generations": 2, "rl.num_iterations": 1, "rl.grpo_beta": 0.08, "rl.grpo_epsilon": 0.2,
        "rl.loss_algo": "grpo", "learning_rate": 3e-6, "adam_b2": 0.99, "gradient_clipping_threshold": 0.1,
        "max_target_length": 1024, "weight_dtype": "bfloat16", "batch_size": 1, "num_batches": 4,
        "max_prefill_predict_length": 256, "data_shuffle_seed": 42, "decode_sampling_temperature": 0.9,
        "dataset_name": "openai/gsm8k", "checkpoint_period": 50,
        "attention": "dot_product", "remat_policy": "custom", "decoder_layer_input": "offload",
        "query_proj": "offload", "key_proj": "offload", "value_proj": "offload",
    },
}  # fmt: skip
# The program -> the file that it reads if the command names none; others read base.yml.
PROGRAM = re.compile(r"(?:.*[./])?train_(sft|dpo|rl)(?:_native)?(?:\.py)?")


class Reading(NamedTuple):
    """What was found.

    Attributes:
      given: key -> value, the last one where it is set more than once.
      where: key -> what set it, such as `command` or a file's name.
      defaults: MaxText's value of every other key that decides what is trained.
      device: the machine, such as v5p-128, if it is named.
      slices: how many of it.
      notes: what the reader should know, such as variables without a value.
      options: of XLA's compiler, such as xla_tpu_scoped_vmem_limit_kib=98304.
    """

    given: dict[str, Any]
    where: dict[str, str]
    defaults: dict[str, Any]
    device: str | None
    slices: int
    notes: list[str]
    options: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Every key's value; a variable that has none here leaves the default."""
        return self.defaults | {key: v for key, v in self.given.items() if not is_variable(v)}


def is_variable(value: Any) -> bool:
    """Whether a value has a variable in it that isn't set here."""
    return isinstance(value, str) and "$" in value


def read(text: str) -> Reading:
    """Reads a command, or the file that the text names: YAML, a page in Markdown with code in it, or else a script.

    Raises:
      UserError: for a text without settings of MaxText, an open quote, a file that can't be read, a model_name that
        MaxText doesn't have.
    """
    if len(text) > LIMIT:
        raise UserError(f"the command has {len(text):,} characters: give at most {LIMIT:,}")
    if "\0" in text:
        raise UserError("the command has a zero byte: give text")
    words = _Words()
    path = _as_path(text)
    if path is not None and path.suffix in (".yml", ".yaml"):
        _load(path, words, 0)
    elif path is not None and path.suffix == ".md":
        for block in blocks_of_code(files.read_text(path, LIMIT)):
            words.take(block, 0)
    elif path is not None:
        words.take(files.read_text(path, LIMIT), 0)
    else:
        words.take(text, 0)
    if not (words.given or words.files or words.program):
        raise UserError(
            f"{files.shorten(text.strip())} sets no key of MaxText: give its command with key=value, or a .yml file"
        )
    return _with_model(words, path)


def blocks_of_code(text: str) -> list[str]:
    """Returns the blocks of a page in Markdown that set something for MaxText."""
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    marks = "MaxTextModel(", "base.yml", *(f"--{name}" for name in DEVICE)
    return [block for block in blocks if any(mark in block for mark in marks)]


def settings(words: list[str]) -> Reading:
    """Reads words alone, `key=value` and files, such as those beside a checkpoint.

    Raises:
      UserError: as `read`.
    """
    found = _Words()
    for word in words:
        path = _as_path(word)
        if path is not None and "=" not in word:
            _load(path, found, 0)
        elif not found.pair(word):
            raise UserError(
                f"{files.shorten(word)} is neither key=value of MaxText, such as model_name=llama3.1-8b, nor a file"
            )
    return _with_model(found, None)


def _with_model(words: "_Words", path: Path | None) -> Reading:
    """Returns what was found, over the sizes of the model that it names."""
    if words.program and not words.files:
        words.config_file(words.program, over=words.given)
    defaults = dict(maxtext_model.facts()["defaults"])
    name = words.given.get("model_name")
    if name in (None, "", "default") or is_variable(name):
        if path is not None and path.parent.name == "models" and "decoder_block" in words.given:
            defaults["model_name"] = path.stem  # one of MaxText's own files, named after its model
    else:
        defaults |= _sizes(str(name), words)
    slices = words.nodes if (words.device or "").startswith("h100") else words.slices
    options = [*words.options, *words.take_flags(str(words.given.get("compile_xla_flags") or ""))]
    return Reading(words.given, words.where, defaults, words.device, slices, words.notes, options)


def _sizes(name: str, words: "_Words") -> dict[str, Any]:
    """Returns what a model_name sets: from the table, or from a file beside the base.yml that was read."""
    beside = [path.parent / "models" / f"{name}.yml" for path in words.files]
    if name not in maxtext_model.facts()["models"] and set(name) <= set(_NAME):
        for path in beside:
            if path.is_file():
                inner = _Words()
                _load(path, inner, 1)
                return inner.given
    return maxtext_model.named_model(name)


_NAME = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"


def _as_path(text: str) -> Path | None:
    """Returns the file that a text names; None if it is a command."""
    text = text.strip()
    if not text or len(text) > 4096 or "\n" in text:
        return None
    if os.path.isfile(os.path.expanduser(text)):  # False too where no file could have such a name
        return Path(os.path.expanduser(files.local_path(text)))
    if os.path.isdir(os.path.expanduser(text)):
        raise UserError(f"{files.shorten(text)} is a folder: name a file in it")
    if "=" in text:
        return None
    path = Path(text)
    if re.fullmatch(r"\S+\.(ya?ml|sh|txt|md)", text):
        if path.name in FILES:
            return None
        raise UserError(
            f"{files.shorten(text)} isn't a file on this machine: give its path, or the command's key=value"
        )
    return None


class _Words:
    """The settings found so far."""

    def __init__(self):
        self.given: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        self.files: list[Path] = []
        self.notes: list[str] = []
        self.options: list[str] = []
        self.program = ""  # the file that the program reads by itself
        self.device: str | None = None
        self.slices = self.nodes = 1
        self.variables: dict[str, str] = {}

    def take_flags(self, text: str, variable: str = "") -> list[str]:
        """Returns the compiler's options among flags; a note names the others."""
        found = [flag.removeprefix("--") for flag in text.split() if XLA_OPTION.fullmatch(flag)]
        others = [flag for flag in text.split() if not XLA_OPTION.fullmatch(flag)]
        if others:
            self.notes.append(
                f"{files.shorten(' '.join(others))} in {variable or 'compile_xla_flags'} isn't an option of XLA's "
                "compiler: set it in the environment of minitext"
            )
        return found

    def set(self, key: str, value: Any, where: str) -> None:
        """Takes a value."""
        self.given[key], self.where[key] = value, where

    def take(self, text: str, depth: int) -> None:
        """Takes the settings of a command or script."""
        if depth > DEPTH:
            raise UserError("the command has texts inside texts deeper than 8: give the inner one")
        if "MaxTextModel(" in text:
            self.take_models(text)
        words = list(_split(text))
        i = 0
        while i < len(words):
            word = words[i]
            flag = re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
            if flag is not None:
                value = flag[2]
                if (
                    value is None
                    and i + 1 < len(words)
                    and flag[1] in (*DEVICE, *SLICES, *NODES, "command")
                ):
                    i += 1
                    value = words[i]
                self.flag(flag[1], value, depth)
            elif not self.pair(word):
                self.other(word, depth)
            i += 1

    def flag(self, name: str, value: str | None, depth: int) -> None:
        """Takes a flag of a launcher such as xpk; others than those of the machine and the command are left."""
        if name in maxtext_model.facts()["defaults"]:
            said = f"--{name}" if value is None else f"--{name}={files.shorten(value)}"
            self.notes.append(
                f"{said} is not read: MaxText's keys have no dashes, as in {name}=VALUE"
            )
        if value is None:
            return
        value = self.expand(value)
        if name in DEVICE:
            if is_variable(value):
                self.notes.append(
                    f"--{name}={value[:60]} has no value here: name the chips with --target"
                )
            else:
                self.device = value
        elif name in (*SLICES, *NODES):
            if not re.fullmatch(r"[1-9]\d{0,4}", value):
                if "$" in value:
                    self.notes.append(f"--{name}={value} has no value here: 1 is assumed")
                    return
                raise UserError(
                    f"--{name}={files.shorten(value)} is not a number of slices or nodes: give 1 or more"
                )
            if name in NODES:
                self.nodes = int(value)
            else:
                self.slices = int(value)
        elif name == "command":
            self.take(value, depth + 1)

    def pair(self, word: str) -> bool:
        """Takes `key=value`; returns whether the word was one."""
        key, sep, value = word.partition("=")
        if not sep or not KEY.fullmatch(key):
            return False
        value = value.rstrip(";") if not value.startswith("[") else value
        if key in FLAGS:
            self.options += self.take_flags(self.expand(value), key)
        if key.isupper() and key.startswith(
            "M_"
        ):  # MaxText's own way to set a key by the environment
            self.set(key[2:].lower(), _value(key, self.expand(value)), "environment")
        elif key.upper() == key:
            self.variables[key] = self.expand(value)
            if key in ("TPU_TYPE", "DEVICE_TYPE", "ACCELERATOR_TYPE"):
                self.device = self.device or self.variables[key]
        else:
            self.set(key, _value(key, self.expand(value)), "command")
        return True

    def other(self, word: str, depth: int) -> None:
        """Takes a word that is no `key=value`: a file of MaxText's, or a variable with words in it."""
        expanded = self.expand(word)
        if expanded != word and re.search(r"\w=|\.ya?ml", expanded):
            return self.take(expanded, depth + 1)
        if re.fullmatch(r"[^\s$]+\.ya?ml", expanded):
            self.config_file(expanded)
        elif program := PROGRAM.fullmatch(expanded):
            self.program = f"{program[1]}.yml"
        elif expanded in maxtext_model.facts()["defaults"]:
            self.notes.append(f"{expanded} has no value: write {expanded}=VALUE")
        elif expanded.startswith("="):
            self.notes.append(f"{files.shorten(expanded)} has no key before its value")

    def config_file(self, name: str, over: Collection[str] = ()) -> None:
        """Takes a file: the one on this machine, or else what MaxText's own is known to say.

        Args:
          name: its path.
          over: keys that are set already, and stay so.
        """
        path = Path(os.path.expanduser(files.local_path(name)))
        if path.is_file():
            return _load(path, self, 0)
        if path.name not in FILES:
            raise UserError(
                f"{files.shorten(name)} isn't a file on this machine: give the path of one that is, or put its "
                "settings into the command as key=value"
            )
        self.files.append(path)
        for key, value in FILES[path.name].items():
            if key not in over:
                self.set(key, value, path.name)

    def expand(self, text: str) -> str:
        """Replaces variables that have a value here; a name without one stays."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3]
            return self.variables.get(name, match[2] if match[2] is not None else match[0])

        for _ in range(DEPTH):
            new = VARIABLE.sub(value, text)
            if new == text or len(new) > LIMIT:
                break
            text = new
        return text

    def take_models(self, text: str) -> None:
        """Takes the first `MaxTextModel(...)` of MaxText's benchmarks: its model and its tuning_params."""
        begin = text.index("MaxTextModel(")
        end = _closing(text, begin + len("MaxTextModel"))
        try:
            call = ast.parse(text[begin:end].strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise UserError(
                f"MaxTextModel(...) cannot be read ({type(error).__name__}): copy it whole"
            ) from None
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            try:
                value = ast.literal_eval(keyword.value)
            except (ValueError, RecursionError):
                continue  # flags of XLA, which are names
            if keyword.arg == "model_type":
                self.set("model_name", str(value), "MaxTextModel")
            elif keyword.arg == "tuning_params" and isinstance(value, dict):
                for key, inner in value.items():
                    self.set(str(key), inner, "MaxTextModel")


def _closing(text: str, begin: int) -> int:
    """Returns where the bracket at `begin` closes."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise UserError("MaxTextModel( has no closing bracket: copy it whole")


def _split(text: str) -> Iterator[str]:
    """Yields the words of a shell's text, quotes and comments taken out."""
    text = re.sub(r"\\\r?\n", " ", text)
    if "MaxTextModel(" in text:
        begin = text.index("MaxTextModel(")
        text = text[:begin] + text[_closing(text, begin + len("MaxTextModel")) :]
    # For shlex a comment begins in the middle of a word too, for a shell it doesn't.
    text = re.sub(r"(?<=[^\s;&|()])#", "\0", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        for word in lexer:
            yield word.replace("\0", "#")
    except ValueError as error:
        raise UserError(
            f"the command has an open quote ({str(error).lower()}): close it, or give the command in quotes of the "
            "other kind"
        ) from None


def _value(key: str, text: str) -> Any:
    """Returns a value as MaxText reads it: YAML, or else the text."""
    if len(text) > 10_000:
        raise UserError(f"{key} has a value of {len(text):,} characters: correct it")
    try:
        found = yaml_text.parse(text, unique=False)
    except yaml_text.BadYAML as error:
        if "nested" in str(error):
            raise UserError(f"{key} {error}: correct it") from None
        return text
    return text if found is None and text.lower() not in ("", "null", "~", "none") else found


def _load(path: Path, words: _Words, depth: int) -> None:
    """Takes a YAML file, and before it the one that it names as its base."""
    if depth > DEPTH:
        raise UserError(f"{path}: base_config leads from file to file without end: correct it")
    text = files.read_text(path, LIMIT)
    try:
        tree = yaml_text.parse(text, unique=False)
    except yaml_text.BadYAML as error:
        raise UserError(f"{files.shorten(str(path))} {error}: correct it") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} doesn't hold keys with values: name a file of MaxText's settings")
    base = tree.pop("base_config", None)
    if isinstance(base, str):
        _base(path, base, words, depth)
    words.files.append(path)
    for key, value in tree.items():
        if not isinstance(key, str):
            raise UserError(f"{path}: {ascii(key)[:60]} isn't a key: correct it")
        nested = isinstance(value, dict) and value
        for inner, leaf in value.items() if nested else [(None, value)]:
            words.set(key if inner is None else f"{key}.{inner}", leaf, path.name)


def _base(path: Path, base: str, words: _Words, depth: int) -> None:
    given = Path(os.path.expanduser(files.local_path(base)))
    for candidate in (*(parent / given for parent in path.parents[:UP]), given):
        if candidate.is_file() and candidate.resolve() != path.resolve():
            return _load(candidate, words, depth + 1)
    if given.name not in FILES:
        raise UserError(
            f"{path}: base_config={files.shorten(base)} isn't a file on this machine: correct the path"
        )
    words.files.append(given)
