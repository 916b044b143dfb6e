"""Which page of the cache holds which tokens: tables, shared pages, and pages found again by what they hold.

The cache of keys and values is divided into pages of a few tokens each. A sequence's table lists its pages in order.
They can be anywhere, so a sequence takes memory as it grows, and no gaps are left between sequences (Kwon et al. 2023,
PagedAttention). Sequences that begin alike share pages. This file only keeps the books, in Python integers; the engine
writes and copies what is in the pages.

A full page is found again by `(parent, tokens)`: the page before it, or 0, and its own tokens. vLLM chains hashes,
hash(parent's hash, tokens). Here the parent's number stands for all the tokens before, and the dictionary compares what
it hashes, so equal hashes never give another text's cache. The pages that can be found form a tree, as in SGLang
(Zheng et al. 2024), which obeys three rules:

- Only full pages are in it, and they are never written again.
- A sequence that holds one of them holds its parents too. So `commit` gives a sequence that computed the same page as
  another sequence the page of the other.
- Among pages that no sequence holds, children come before their parents in the order of use. The least recently used
  page is then always a leaf, and taking it cuts off no other page.

Chapters: 24.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from minitext.errors import UserError

_Entry = tuple[int, tuple[int, ...]]  # a full page's parent and its tokens


class OutOfPages(Exception):
    """There are fewer pages to take than a sequence needs: release another sequence first."""


@dataclass(slots=True)
class _Sequence:
    table: list[int]
    length: int  # committed tokens
    room: int  # tokens that it may have before the next `extend`
    findable: bool  # whether others may find its full pages
    root: int  # stands for what its first page follows


class Pages:
    """Tables of pages for sequences, each known by a number of the caller's (`key`).

    A step takes these calls: `extend` each sequence, make the copies that it returns, compute and write the tokens into
    the pages of `table`, `commit` them. What an operation costs grows with the pages of its sequence, never with all
    pages; commits read each token once.

    Attributes:
      pages: pages of the cache, P. Page 0 is never handed out: padding is written there.
      page_tokens: tokens in a page, S. Token t of a sequence is in slot t % S of page `table[t // S]`.
      reuse: whether pages may be found by what they hold. Recurrent layers have to do without, because their states
        sum up a whole text and aren't in pages.
    """

    def __init__(self, pages: int, page_tokens: int, *, reuse: bool = True):
        """All pages are free.

        Raises:
          UserError: fewer than two pages, or pages without tokens.
        """
        if pages < 2:
            raise UserError(f"pages={pages}: choose at least 2, because page 0 is for padding")
        if page_tokens < 1:
            raise UserError(f"page_tokens={page_tokens}: choose at least 1")
        self.pages, self.page_tokens, self.reuse = pages, page_tokens, reuse
        self._sequences: dict[int, _Sequence] = {}
        self._counts = [0] * pages  # in how many tables a page is
        self._empty = list(range(pages - 1, 0, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._found: dict[_Entry, int] = {}
        self._entry: dict[int, _Entry] = {}  # the same, from the page

    @property
    def free(self) -> int:
        """Pages that `extend` can still take: empty ones, and kept ones. `admit` may make it fewer."""
        return len(self._empty) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages in at least one table."""
        return self.pages - 1 - self.free

    @property
    def kept(self) -> int:
        """Pages in no table that can still be found."""
        return len(self._kept)

    def match(self, tokens: Sequence[int], root: int = 0) -> int:
        """Returns how many leading tokens are in pages that can be found: whole pages, and at most len(tokens) - 1.

        Sequences with another `root`, 0 or less, have other pages for the same tokens, as other adapters demand.

        One token must be computed in any case, because the next one is drawn from its logits.
        """
        return len(self._find(tokens, root)) * self.page_tokens

    def admit(self, key: int, tokens: Sequence[int], root: int = 0) -> int:
        """Begins a sequence with the pages that `match` finds for its tokens; returns how many tokens they hold.

        Raises:
          ValueError: there is a sequence `key` already.
        """
        pages = self._find(tokens, root)
        length = len(pages) * self.page_tokens
        self._begin(key, _Sequence(pages, length, length, self.reuse, root))
        return length

    def extend(self, key: int, length: int) -> list[tuple[int, int]]:
        """Makes room for `length` tokens in all, those in the cache included.

        A partly filled last page that others hold too is replaced by a copy of its own (copy on write). The last
        sequence that holds it writes in place.

        Returns:
          (source, target) of the pages to copy before this sequence's tokens are written: none or one. Copies of
          several calls are made in the order of the calls.

        Raises:
          OutOfPages: there are too few pages, and nothing has changed.
        """
        sequence = self._sequences[key]
        if length <= sequence.length:
            return []
        table = sequence.table
        last, filled = divmod(sequence.length, self.page_tokens)
        shared = filled > 0 and self._counts[table[last]] > 1
        more = max(0, -(-length // self.page_tokens) - len(table))
        if more + shared > self.free:
            raise OutOfPages(f"{more + shared} pages needed, {self.free} of {self.pages - 1} free")
        copies = []
        if shared:
            copies = [(table[last], self._take())]
            self._let_go(table[last])
            table[last] = copies[0][1]
        table.extend(self._take() for _ in range(more))
        sequence.room = length
        return copies

    def commit(self, key: int, tokens: Sequence[int]) -> None:
        """Notes that `tokens`, all of the sequence's so far, are in the cache: its full pages can be found from now on.

        If a page with the same tokens after the same parents can be found already, the sequence gets that one instead
        of its own: ask for the table again.

        Raises:
          ValueError: these are fewer tokens than before, or more than there is room for.
        """
        sequence = self._sequences[key]
        if not sequence.length <= len(tokens) <= sequence.room:
            has = f"the sequence has {sequence.length} tokens and room for {sequence.room}"
            raise ValueError(f"{len(tokens)} tokens: {has}")
        first, end = sequence.length // self.page_tokens, len(tokens) // self.page_tokens
        for i in range(first, end if sequence.findable else first):
            page = sequence.table[i]
            parent = sequence.table[i - 1] if i else sequence.root
            entry = parent, self._tokens_of_page(tokens, i)
            found = self._found.setdefault(entry, page)
            if found == page:
                self._entry[page] = entry
            else:
                self._hold(found)
                self._let_go(page)
                sequence.table[i] = found
        sequence.length = len(tokens)

    def fork(self, key: int, new: int) -> None:
        """Begins a sequence `new` with the committed tokens of `key`, and with the same pages.

        Both must `extend` before they write.

        Raises:
          ValueError: there is a sequence `new` already.
        """
        old = self._sequences[key]
        pages = old.table[: -(-old.length // self.page_tokens)]
        self._begin(new, _Sequence(pages, old.length, old.length, old.findable, old.root))
        old.room = old.length

    def release(self, key: int) -> None:
        """Ends a sequence. Its full pages can be found until they are needed for something else."""
        for page in reversed(self._sequences.pop(key).table):  # children before their parents
            self._let_go(page)

    def table(self, key: int) -> list[int]:
        """Returns the pages of a sequence, in order."""
        return list(self._sequences[key].table)

    def clear(self) -> None:
        """Forgets what all pages hold, as new weights demand: nothing computed so far is found again.

        Sequences go on with their pages, and none of theirs can be found, now or later.
        """
        self._empty.extend(self._kept)
        self._kept.clear()
        self._found.clear()
        self._entry.clear()
        for sequence in self._sequences.values():
            sequence.findable = False

    def _tokens_of_page(self, tokens: Sequence[int], i: int) -> tuple[int, ...]:
        return tuple(tokens[i * self.page_tokens : (i + 1) * self.page_tokens])

    def _find(self, tokens: Sequence[int], root: int) -> list[int]:
        """The pages that hold the first tokens."""
        pages = []
        for i in range((len(tokens) - 1) // self.page_tokens):
            parent = pages[-1] if pages else root
            page = self._found.get((parent, self._tokens_of_page(tokens, i)))
            if page is None:
                break
            pages.append(page)
        return pages

    def _begin(self, key: int, sequence: _Sequence) -> None:
        if key in self._sequences:
            raise ValueError(f"there is a sequence {key} already")
        self._sequences[key] = sequence
        for page in sequence.table:
            self._hold(page)

    def _hold(self, page: int) -> None:
        self._counts[page] += 1
        self._kept.pop(page, None)

    def _let_go(self, page: int) -> None:
        self._counts[page] -= 1
        if self._counts[page] == 0:
            if page in self._entry:
                self._kept[page] = None
            else:
                self._empty.append(page)

    def _take(self) -> int:
        """A page for one table: an empty one, or else the least recently used of those kept."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._found[self._entry.pop(page)]
        self._counts[page] = 1
        return page
