"""MaxText's keys, for those who know them: what minitext says in place of each.

The answers are data, `maxtext.yml` beside this file, which is read when somebody uses a key that minitext does not
have. The book's map to MaxText is made from the same file.
"""

from functools import cache
from importlib import resources
from typing import Any

import yaml

FILE = resources.files("minitext.config").joinpath("maxtext.yml")


@cache
def groups() -> list[dict[str, Any]]:
    """Returns the groups of `maxtext.yml`, each a `title` and its `rows`; the file's head says what a row has."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return {key: row for group in groups() for row in group["rows"] for key in row["maxtext"]}


def row(key: str) -> dict[str, Any] | None:
    """Returns the row that answers a key of MaxText, or None if MaxText neither has nor had it."""
    return _rows().get(key)


def answer(key: str) -> str | None:
    """Returns what to set in place of a key of MaxText.

    Args:
      key: a key such as `per_device_batch_size`.

    Returns:
      The rest of a sentence that begins with the key, or None if MaxText neither has nor had it.
    """
    found = row(key)
    if found is None:
        return None
    whose = (
        f"was MaxText's name until {found['until']}" if "until" in found else "is MaxText's name"
    )
    ours = f"says {found['here']}" if "here" in found else f"has no key for it: {found['none']}"
    return f"{whose}; minitext {ours}"
