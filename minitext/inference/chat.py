"""Talking to a published model: its chat template, its special tokens, and the tokens that end its turn.

All three come with a checkpoint and are kept in a run's folder `published`, in the files of a Hugging Face folder.

Chapters: 23.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minitext import files
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError

JSON_LIMIT, TEMPLATE_LIMIT = 16 << 20, 256 << 10  # bytes; the longest known templates have 20,000
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

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Returns the messages as the model was trained to see them, up to where its answer begins.

        Args:
          messages: each with `role` (system, user or assistant) and `content`.

        Raises:
          UserError: there is no template, it refuses the messages, or it wants more time or memory than a template may.
        """
        if self.template is None:
            raise UserError(
                f"{self.where.parent} has no chat template, so its model wasn't trained for conversations: "
                "give it text to go on from, with --prompt"
            )
        values = {**self.special, "messages": list(messages), "tools": None, "documents": None}
        values["add_generation_prompt"] = True
        found = _in_a_process({"template": self.template, "values": values})
        if "text" not in found:
            raise UserError(
                f"the chat template of {self.where.parent} cannot be rendered: "
                f"{files.shorten(' '.join(found['error'].split()))}"
            )
        return found["text"]


def _in_a_process(job: dict[str, Any]) -> dict[str, str]:
    """Returns what `chat_template.py` answers."""
    program = Path(__file__).with_name("chat_template.py")
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(program)], input=json.dumps(job), text=True, capture_output=True,
            timeout=WALL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"it was not done after {WALL_SECONDS:.0f} seconds"}
    if done.returncode < 0:  # by a signal: of the processor's time, or for want of stack
        return {"error": "it takes too long or goes too deep"}
    if done.returncode:  # not the template's doing
        raise RuntimeError(f"{program} failed: {done.stderr}")
    return json.loads(done.stdout)


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
            f"the chat template of {folder.parent} is not a text of at most {TEMPLATE_LIMIT:,} characters: get it again"
        )
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    stops = {i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)}
    special = special_tokens(_object(folder / "special_tokens_map.json") | said)
    return Chat(template, special, frozenset(stops | {tokenizer.eod_id}), folder)


def special_tokens(said: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens in tokenizer_config.json by name, such as bos_token -> <s>."""
    found = {}
    for name, token in said.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, which may be missing."""
    found = files.read_json(path, JSON_LIMIT) if path.exists() else {}
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no object: get it again")
    return found
