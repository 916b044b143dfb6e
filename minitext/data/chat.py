"""Talking to a published model: its chat template, its special tokens, and the tokens that end its turn.

All three come with a checkpoint and are kept in a run's folder `published`, in the files of a Hugging Face folder.

Chapters: 23.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.config.data import DataConfig
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

JSON_LIMIT, TEMPLATE_LIMIT = 16 << 20, 256 << 10  # bytes; the longest known templates have 20,000
PLAIN = """{% for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""  # of a model that came without a template
WALL_SECONDS = 60.0  # on a machine that is busy; of the processor, a template gets 3 seconds


class Chat(NamedTuple):
    """What a checkpoint says about conversations.

    Attributes:
      template: the text of the chat template, or None.
      special: name -> token, such as bos_token -> <s>.
      stops: ids that end the model's turn.
      where: the folder it was read from.
    """

    template: str | None
    special: dict[str, str]
    stops: frozenset[int]
    where: Path

    def render(
        self, messages: Sequence[Mapping[str, str]], renderer: "Renderer | None" = None
    ) -> str:
        """Returns the messages as the model was trained to see them, up to where its answer begins.

        Args:
          messages: each with `role` (system, user or assistant) and `content`.
          renderer: one that is kept for the next call; None: one is started, which takes a tenth of a second.

        Raises:
          UserError: there is no template, it refuses the messages, or it wants more time or memory than a template may.
        """
        self.check()
        values = self.values(messages)
        with contextlib.ExitStack() as stack:
            if renderer is None:
                renderer = stack.enter_context(contextlib.closing(Renderer()))
            found = renderer.render({"template": self.template, "values": values})
        if "text" not in found:
            raise UserError(
                f"the chat template of {self.where.parent} cannot be rendered: "
                f"{files.shorten(' '.join(found['error'].split()))}"
            )
        return found["text"]

    def check(self) -> None:
        """Raises UserError if there is no template."""
        if self.template is None:
            raise UserError(
                f"{self.where.parent} has no chat template, so its model wasn't trained for conversations: "
                "give it text to go on from, with minitext generate --prompt, or teach it with minitext sft"
            )

    def values(self, messages: Sequence[Mapping[str, str]], ask: bool = True) -> dict[str, Any]:
        """Returns the variables of the template; with `ask` its text ends where the model's answer begins."""
        values = {**self.special, "messages": list(messages), "tools": None, "documents": None}
        return values | {"add_generation_prompt": ask}

    def plain(self, tokenizer: Tokenizer) -> "Chat":
        """Returns a plain template for a model that has none; each answer ends with the end of a document."""
        special = {"eos_token": tokenizer.published_end()} | self.special
        return self._replace(template=PLAIN, special=special)


class Renderer:
    """A process that renders templates, one at a time; it starts when it's needed first, and again if it dies."""

    def __init__(self):
        self._process: subprocess.Popen[str] | None = None

    def render_all(
        self, template: str, values: Sequence[Mapping[str, Any]], *, marks: bool
    ) -> list[dict[str, Any]]:
        """Renders a template with each of many variables.

        Args:
          template: its text.
          values: the variables of each.
          marks: whether to say what its tag `generation` marks.

        Returns:
          What `chat_template.render_all` does.
        """
        found = self.render({"template": template, "all": list(values), "marks": marks})
        if "found" in found:
            return found["found"]
        if len(values) == 1:
            return [found]
        # Together they took too long; those that do so alone say so.
        half = len(values) // 2
        parts = (values[:half], values[half:])
        return [one for part in parts for one in self.render_all(template, part, marks=marks)]

    def render(self, job: dict[str, Any]) -> dict[str, Any]:
        """Returns what `chat_template.py` answers."""
        if self._process is None or self._process.poll() is not None:
            program = Path(__file__).with_name("chat_template.py")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program)],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(WALL_SECONDS, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            late.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        if process.wait() == -signal.SIGKILL:
            return {"error": f"it was not done after {WALL_SECONDS:.0f} seconds"}
        raise RuntimeError("chat_template.py failed")  # not the template's doing

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()


def read_chat(folder: Path, tokenizer: Tokenizer) -> Chat:
    """Reads what a folder of Hugging Face's says about conversations; the folder may be missing.

    Args:
      folder: with chat_template.jinja, tokenizer_config.json, special_tokens_map.json, generation_config.json or
        config.json, or some of them.
      tokenizer: the model's; the token that ends a text always ends a turn.

    Raises:
      UserError: for a file that can't be read or is too long.
    """
    said, generation, config = (
        _object(folder / name)
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )
    template = said.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if (path := folder / "chat_template.jinja").exists():
        template = files.read_text(path, TEMPLATE_LIMIT)
    if template is not None and (not isinstance(template, str) or len(template) > TEMPLATE_LIMIT):
        raise UserError(
            f"the template of {folder.parent} is not a text of at most {TEMPLATE_LIMIT:,} characters: copy it again"
        )
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    stops = {i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)}
    special = special_tokens(_object(folder / "special_tokens_map.json") | said)
    return Chat(template, special, frozenset(stops | {tokenizer.eod_id}), folder)


def open_template(cfg: DataConfig, tokenizer: Tokenizer, folder: Path | None = None) -> Chat:
    """Returns how conversations are rendered: data.chat_template, or else a folder's template, or a plain one.

    Args:
      cfg: the data section of a config.
      tokenizer: the model's.
      folder: the model's folder `published`, which may be missing; None if it has none.

    Raises:
      UserError: for a file that can't be read or is too long.
    """
    chat = Chat(None, {}, frozenset({tokenizer.eod_id}), Path("published"))
    if folder is not None:
        chat = read_chat(folder, tokenizer)
    if cfg.chat_template is not None:
        path = Path(os.path.expanduser(cfg.chat_template))
        return chat.plain(tokenizer)._replace(template=files.read_text(path, TEMPLATE_LIMIT))
    return chat if chat.template is not None else chat.plain(tokenizer)


def special_tokens(said: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens in tokenizer_config.json by name, such as bos_token -> <s>."""
    found = {}
    for name, token in said.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def write_chat(folder: Path, chat: Chat, ends: Collection[int]) -> None:
    """Writes a template where `read_chat` finds it, with what it needs; what files there say stays.

    Args:
      folder: a run's folder `published`, which may be missing.
      chat: the template and its special tokens.
      ends: ids that end the model's turn; generation will stop at them too.

    Raises:
      UserError: for a file there that can't be read.
      OSError: if the folder can't be written.
    """
    folder.mkdir(exist_ok=True)
    files.write(folder / "chat_template.jinja", chat.template or "")
    path = folder / "tokenizer_config.json"
    said = _object(path) if path.exists() else {"tokenizer_class": "PreTrainedTokenizerFast"}
    known = special_tokens(_object(folder / "special_tokens_map.json") | said)
    missing = {name: token for name, token in chat.special.items() if name not in known}
    if missing or not path.exists():
        files.write(path, json.dumps(said | missing, indent=2))
    if more := set(ends) - chat.stops:
        path = folder / "generation_config.json"
        stops = sorted(chat.stops | more)
        files.write(path, json.dumps(_object(path) | {"eos_token_id": stops}, indent=2))


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, which may be missing."""
    found = files.read_json(path, JSON_LIMIT) if path.exists() else {}
    if not isinstance(found, dict):
        raise UserError(f"{path} has no keys with values: copy it again")
    return found
