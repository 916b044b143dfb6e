"""Reads a grammar in a process of its own that may use little time and memory.

A few characters of a grammar can keep llguidance busy for hours, and take gigabytes. Its own limits don't count all of
this, and nothing ends a thread that computes. So `minitext.inference.structured` runs this file as a program, with the
grammar on stdin, before it reads the grammar itself. A grammar that is too much ends the process. What else is wrong
with a grammar is for whoever reads it next.

Chapters: 24.
"""

import resource
import sys
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

MORE_BYTES = 64 << 20  # of memory, for what a grammar becomes; an engine keeps it for each request


def _limit(kind: int, amount: int) -> None:
    _, most = resource.getrlimit(kind)
    amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
    resource.setrlimit(kind, (amount, most))


def main() -> None:
    """Reads the grammar on stdin, and writes `fine` unless it is too much.

    The first argument is how many seconds of the processor the process may take.
    """
    grammar, known = sys.stdin.read(), LLTokenizer("byte")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(sys.argv[1]))
    if sys.platform == "linux":  # macOS doesn't enforce a limit of memory
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MORE_BYTES)
    if not LLMatcher.validate_grammar(grammar, known):
        LLMatcher(known, grammar, log_level=0).compute_bitmask()
    print("fine", end="")


if __name__ == "__main__":
    main()
