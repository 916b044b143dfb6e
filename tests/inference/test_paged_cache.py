"""The cache's books against a simulated cache: after any history everyone reads back exactly what it wrote."""

import copy
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minitext.errors import UserError
from minitext.inference.paged_cache import OutOfPages, Pages


class Token(int):
    """A token whose hash is that of any other."""

    def __hash__(self):
        return 1


# Few different tokens: texts often begin alike, and often differ only late.
TEXTS = st.integers(2, 1023).map(lambda n: [Token(bit) for bit in bin(n)[3:]])  # of 1 to 9 tokens
LENGTHS = st.integers(1, 9)
DROPS = st.sampled_from([0, 0, 0, 1, 2])
ANY = st.sampled_from(range(12))
SIZES = st.sampled_from([1, 10, 20, 30, 40, 50, 60, 70, 80])  # tokens that all pages can hold
OFTEN = st.sampled_from([True] * 9 + [False])
MOST = 5  # sequences at once


class Histories(RuleBasedStateMachine):
    """Any history of sequences over a few small pages.

    `memory` is what a cache would hold: for each (page, slot) written, the whole text up to the token written there,
    because keys and values depend on it. Copies wait, in order, until something is written.
    """

    @initialize(size=SIZES, S=st.sampled_from([2, 3, 4, 1]), reuse=OFTEN, text=TEXTS)
    def start(self, size, S, reuse, text):
        self.pages = Pages(2 + size // S, S, reuse=reuse)
        self.S, self.next = S, 0
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.copies: list[tuple[int, int]] = []
        self.seen: list[list[int]] = []
        # Of each sequence: its prompt and what it has written after it, how much is committed, and how much may be.
        self.texts: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.room: dict[int, int] = {}
        self.outdated: set[int] = set()  # those begun before the last `clear`
        self.admit(text, True)

    def some(self):
        return bool(self.texts)

    def not_all(self):
        return len(self.texts) < MOST

    def key(self, one):
        return sorted(self.texts)[one % len(self.texts)]

    def new_key(self):
        self.next += 1
        return self.next

    def read(self, table, length, memory):
        return [memory.get((table[t // self.S], t % self.S)) for t in range(length)]

    def copied(self):
        """The memory, once the copies are made."""
        memory = dict(self.memory)
        for source, target in self.copies:
            assert source != target
            for slot in range(self.S):
                memory.pop((target, slot), None)
                if (source, slot) in memory:
                    memory[target, slot] = memory[source, slot]
        return memory

    def prefixes(self, text):
        return [tuple(text[: t + 1]) for t in range(len(text))]

    def begin(self, text):
        """Admits a text. What is found is right, and all that running sequences hold is found."""
        key, S = self.new_key(), self.S
        found = self.pages.match(text)
        assert found % S == 0 and 0 <= found < len(text)
        least = 0
        for other in set(self.texts) - self.outdated if self.pages.reuse else ():
            theirs = self.texts[other][: self.length[other] // S * S]
            alike = next(
                (i for i, (a, b) in enumerate(zip(theirs, text, strict=False)) if a != b),
                len(theirs),
            )
            least = max(least, min(alike, len(text) - 1) // S * S)
        assert found >= least
        assert self.pages.admit(key, text) == found
        table = self.pages.table(key)
        assert len(table) * S == found
        assert self.read(table, found, self.copied()) == self.prefixes(text[:found])
        self.texts[key], self.length[key], self.room[key] = list(text), found, found
        self.seen.append(self.texts[key])
        return key

    def end(self, key):
        self.seen.append(self.texts[key])
        self.pages.release(key)
        self.outdated.discard(key)
        del self.texts[key], self.length[key], self.room[key]

    @precondition(not_all)
    @rule(text=TEXTS, compute=st.booleans())
    def admit(self, text, compute):
        key = self.begin(text)
        if compute:
            self.extend_and_write(key, len(text) - self.length[key], text, 0)

    @precondition(not_all)
    @rule(one=ANY, keep=st.integers(1, 20), more=TEXTS, compute=st.booleans())
    def admit_alike(self, one, keep, more, compute):
        self.admit(self.seen[-1 - one % len(self.seen)][:keep] + more, compute)

    @precondition(lambda self: len(self.texts) < MOST - 1)
    @rule(text=TEXTS, longer=TEXTS)
    def admit_twins(self, text, longer):
        """Two sequences that compute the same tokens at the same time."""
        twins = self.begin(text), self.begin(text + longer)
        for key in twins:
            self.extend_sequence(key, len(text) - self.length[key])
        for key in twins:
            self.write_and_commit(key, text, 0)

    @precondition(some)
    @rule(one=ANY, more=LENGTHS)
    def extend(self, one, more):
        self.extend_sequence(self.key(one), more)

    def extend_sequence(self, key, more):
        length, before = self.length[key] + more, copy.deepcopy(vars(self.pages))
        tables = {other: self.pages.table(other) for other in self.texts}
        last, filled = divmod(self.length[key], self.S)
        shared = filled > 0 and sum(tables[key][last] in table for table in tables.values()) > 1
        need = max(0, -(-length // self.S) - len(tables[key])) + shared
        left = self.pages.pages - 1 - len({page for table in tables.values() for page in table})
        try:
            copies = self.pages.extend(key, length)
        except OutOfPages:
            assert need > left
            assert vars(self.pages) == before
            return
        assert need <= left
        assert len(copies) == shared
        assert len(self.pages.table(key)) == max(len(tables[key]), -(-length // self.S))
        for other in set(tables) - {key}:
            assert self.pages.table(other) == tables[other]
        self.copies += copies
        self.room[key] = length

    @precondition(some)
    @rule(one=ANY, more=TEXTS, drop=DROPS)
    def write(self, one, more, drop):
        self.write_and_commit(self.key(one), more, drop)

    def write_and_commit(self, key, more, drop):
        """Writes into all the room, and commits all but the last few tokens, as if a guess at them was wrong."""
        text, length, room = self.texts[key], self.length[key], self.room[key]
        text += (more * 9)[: max(0, room - len(text))]
        self.memory, self.copies = self.copied(), []
        table = self.pages.table(key)
        others = {p for other in self.texts if other != key for p in self.pages.table(other)}
        for t in range(length, room):
            assert table[t // self.S] not in others
            self.memory[table[t // self.S], t % self.S] = tuple(text[: t + 1])
        end = self.length[key] = max(length, room - drop)
        self.pages.commit(key, text[:end])
        if drop:  # the text goes on in another way
            del text[max(1, end) :]

    @precondition(some)
    @rule(one=ANY, more=LENGTHS, text=TEXTS, drop=DROPS)
    def step(self, one, more, text, drop):
        self.extend_and_write(self.key(one), more, text, drop)

    def extend_and_write(self, key, more, text, drop):
        self.extend_sequence(key, more)
        self.write_and_commit(key, text, drop)

    @precondition(lambda self: self.some() and self.not_all())
    @rule(one=ANY, more=TEXTS, compute=OFTEN)
    def fork(self, one, more, compute):
        """A second sequence, which is to go on in its own way."""
        key, new = self.key(one), self.new_key()
        self.pages.fork(key, new)
        length = self.room[key] = self.room[new] = self.length[new] = self.length[key]
        assert self.pages.table(new) == self.pages.table(key)[: -(-length // self.S)]
        self.texts[new] = self.texts[key][:length] + more
        if key in self.outdated:
            self.outdated.add(new)
        if compute:
            self.extend_and_write(new, 1, more, 0)

    @precondition(some)
    @rule(one=ANY)
    def release(self, one):
        self.end(self.key(one))

    @precondition(some)
    @rule(one=ANY)
    def preempt(self, one):
        """Released and admitted again, a sequence finds its own full pages."""
        key = self.key(one)
        text, length, outdated = self.texts[key], self.length[key], key in self.outdated
        self.end(key)
        new = self.begin(text)
        if self.pages.reuse and not outdated:
            assert self.length[new] >= min(length, len(text) - 1) // self.S * self.S

    @rule(no=OFTEN)
    def clear(self, no):
        if no:  # or nothing is ever found
            return
        self.pages.clear()
        self.outdated = set(self.texts)
        assert self.pages.kept == 0
        assert all(self.pages.match([*text, 0]) == 0 for text in self.seen)

    @invariant()
    def every_sequence_reads_back_its_own_text(self):
        memory = self.copied()
        for key, text in self.texts.items():
            length = self.length[key]
            assert self.read(self.pages.table(key), length, memory) == self.prefixes(text[:length])

    @invariant()
    def every_page_is_accounted_for(self):
        pages = self.pages
        tables = [pages.table(key) for key in self.texts]
        assert all(len(set(table)) == len(table) for table in tables)
        counts = Counter(page for table in tables for page in table)
        assert 0 not in counts
        for key, length in self.length.items():  # pages still to be written are nobody else's
            assert all(counts[page] == 1 for page in pages.table(key)[-(-length // self.S) :])
        assert pages._counts == [counts[page] for page in range(pages.pages)]
        assert pages.used == len(counts)
        assert pages.free == pages.pages - 1 - len(counts)
        assert sorted([*pages._empty, *pages._kept, *counts]) == list(range(1, pages.pages))
        assert pages.kept == len(pages._kept) <= (pages.free if pages.reuse else 0)

    @invariant()
    def kept_pages_can_be_found(self):
        memory = self.copied()
        assert self.pages._kept.keys() <= self.pages._entry.keys()
        assert len(self.pages._found) == len(self.pages._entry)
        for page in self.pages._entry:
            text = memory[page, self.S - 1]
            assert self.pages.match([*text, 0]) == len(text)

    def teardown(self):
        """All pages come back, and one sequence can have them all."""
        if not hasattr(self, "pages"):
            return
        for key in list(self.texts):
            self.end(key)
        self.every_page_is_accounted_for()
        assert (self.pages.used, self.pages.free) == (0, self.pages.pages - 1)
        self.pages.admit(0, [2])
        self.pages.extend(0, (self.pages.pages - 1) * self.S)
        assert sorted(self.pages.table(0)) == list(range(1, self.pages.pages))
        assert not (self.pages._found or self.pages._entry or self.pages.kept)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60 if settings.get_current_profile_name() == "test" else 2000,
    stateful_step_count=40,
)


def run(pages, key, text):
    """Admits a text and computes the rest of it; returns how many tokens were found."""
    found = pages.admit(key, text)
    assert pages.extend(key, len(text)) == []
    pages.commit(key, text)
    return found


def test_forks_share_until_they_write():
    """Only the page that is not full is copied, for all but the last of those that write into it."""
    pages = Pages(10, 4)
    run(pages, 0, [1, 2, 3, 4, 5])
    pages.fork(0, 1)
    pages.fork(1, 2)
    full, part = pages.table(0)
    assert pages.table(1) == pages.table(2) == [full, part]
    assert pages.used == 2
    ((source, target),) = pages.extend(0, 6)
    assert source == part
    assert pages.table(0) == [full, target]
    ((source, other),) = pages.extend(1, 6)
    assert source == part
    assert pages.table(1) == [full, other]
    assert pages.extend(2, 6) == []
    assert pages.table(2) == [full, part]
    assert pages.used == 4


def test_a_fork_shares_what_is_committed_and_ends_the_right_to_write():
    pages = Pages(10, 4)
    run(pages, 0, [1, 2])
    pages.extend(0, 5)
    pages.fork(0, 1)
    assert pages.table(1) == pages.table(0)[:1]
    with pytest.raises(ValueError, match="3 tokens: the sequence has 2 tokens and room for 2"):
        pages.commit(0, [1, 2, 3])


def test_two_that_compute_the_same_end_up_with_one_page():
    pages = Pages(10, 2)
    text = [1, 2, 3, 4, 5]
    for key in (0, 1):
        assert pages.admit(key, text) == 0
        pages.extend(key, len(text))
    assert pages.used == 6
    for key in (0, 1):
        pages.commit(key, text)
    assert pages.table(0)[:2] == pages.table(1)[:2]
    assert pages.used == 4
    pages.release(0)
    assert pages.match(text) == 4
    pages.release(1)
    assert pages.match(text) == 4
    assert (pages.used, pages.kept) == (0, 2)


def test_the_least_recently_used_page_goes_first_and_leaves_before_their_parents():
    pages = Pages(6, 1)
    run(pages, 0, [1, 2, 3])
    run(pages, 1, [4, 5])
    pages.release(0)
    pages.release(1)
    assert (
        run(pages, 2, [1, 9]) == 1
    )  # takes the page of [1, 2, 3]; that of [1] is used later than [4, 5] now
    pages.release(2)
    left = []
    for length in (1, 2, 3, 4, 5):
        pages.admit(3, [0])
        pages.extend(3, length)
        left.append([pages.match([*text, 0]) for text in ([1, 2, 3], [4, 5], [1, 9])])
        pages.release(3)
    assert left == [[1, 2, 2], [1, 1, 2], [1, 0, 2], [1, 0, 1], [0, 0, 0]]


def test_equal_hashes_are_not_equal_texts():
    one, other = [Token(i) for i in (1, 2, 3)], [Token(i) for i in (1, 3, 3)]
    assert hash(tuple(one)) == hash(tuple(other))
    pages = Pages(6, 2)
    run(pages, 0, one)
    assert pages.match(other) == 0
    run(pages, 1, other)
    assert pages.match(one) == pages.match(other) == 2
    assert pages.table(0)[0] != pages.table(1)[0]


def test_the_same_tokens_after_others_are_another_page():
    pages = Pages(9, 2)
    run(pages, 0, [1, 1, 2, 2, 3])
    assert pages.match([2, 2, 3]) == 0
    run(pages, 1, [4, 4, 2, 2, 3])
    assert pages.table(0)[1] != pages.table(1)[1]
    assert pages.match([5, 5, 2, 2, 3]) == 0


def test_one_token_of_a_prompt_is_always_computed():
    pages = Pages(9, 2)
    run(pages, 0, [1, 1, 2, 2])
    assert [pages.match([1, 1, 2, 2, 3][:length]) for length in range(6)] == [0, 0, 0, 2, 2, 4]


def test_new_weights_find_nothing_of_the_old():
    pages = Pages(9, 1)
    run(pages, 0, [1, 2])
    pages.release(0)
    run(pages, 1, [1, 3])
    pages.clear()
    assert (pages.used, pages.kept) == (2, 0)
    pages.fork(1, 2)
    for key in (1, 2):
        pages.extend(key, 4)
        pages.commit(key, [1, 3, 4, 5])
        assert pages.match([1, 3, 4, 5]) == 0
        pages.release(key)
    assert (pages.used, pages.kept) == (0, 0)
    run(pages, 3, [1, 3, 4, 5])
    assert pages.match([1, 3, 4, 5]) == 3


def test_without_reuse_nothing_is_kept():
    pages = Pages(9, 1, reuse=False)
    assert run(pages, 0, [1, 2]) == 0
    assert run(pages, 1, [1, 2]) == 0
    assert pages.used == 4
    pages.release(0)
    assert (pages.used, pages.kept, pages.match([1, 2])) == (2, 0, 0)


def test_commits_read_each_token_once():
    """A commit for each new token costs no more than one for all."""

    class Counted(list):
        read = 0

        def __getitem__(self, i):
            Counted.read += len(range(*i.indices(len(self))))
            return super().__getitem__(i)

    pages = Pages(600, 2)
    pages.admit(0, [0])
    for length in range(1, 1000):
        pages.extend(0, length)
        pages.commit(0, Counted(range(length)))
    assert Counted.read == 998


@pytest.mark.parametrize("operation", ["admit", "fork"])
def test_a_number_is_given_once(operation):
    pages = Pages(9, 1)
    run(pages, 0, [1, 2])
    run(pages, 1, [1, 3])
    before = copy.deepcopy(vars(pages))
    with pytest.raises(ValueError, match="there is a sequence 1 already"):
        pages.fork(0, 1) if operation == "fork" else pages.admit(1, [1, 2, 3])
    assert vars(pages) == before


def test_out_of_pages_says_how_many():
    pages = Pages(4, 2)
    run(pages, 0, [1, 2, 3])
    with pytest.raises(OutOfPages, match="2 pages needed, 1 of 3 free"):
        pages.extend(0, 8)


@pytest.mark.parametrize(("pages", "S", "says"), [(1, 16, "pages=1"), (9, 0, "page_tokens=0")])
def test_sizes_are_checked(pages, S, says):
    with pytest.raises(UserError, match=f"{says}: choose at least"):
        Pages(pages, S)
