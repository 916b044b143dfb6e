"""Where things that can be made again are kept: tokens, tokenizers, compiled programs, measurements.

Chapters: 7.
"""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Returns `$MINITEXT_CACHE`, or `~/.cache/minitext`; it need not exist yet."""
    return Path(os.environ.get("MINITEXT_CACHE") or "~/.cache/minitext").expanduser()
