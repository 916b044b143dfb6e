import contextlib
import itertools
import json

import numpy as np

from minitext.book.grading import Exercise

# --------------------------------------------------------------------------------- bpe_merge

bpe_merge = Exercise(
    "07.bpe_merge",
    title="One merge of byte-pair encoding",
    function="merge_step",
    minutes=10,
    points=5,
    statement="""
Write `merge_step(words, counts, new_id)`: one step of training a byte-pair encoding. A text is given
as its different words, each a list of ids, with the number of times that each word occurs.

- Count every pair of neighbours within a word, as often as the word occurs. A word `a a a` has the
  pair `a a` twice. No pair crosses the end of a word.
- The most frequent pair wins. If several are equally frequent, the smallest wins, compared as
  Python compares tuples.
- Replace it by `new_id` in every word, from left to right, without overlap: `a a a` becomes
  `new a`.
- Return the pair and the new words, in the order of the old ones. Don't change the lists that you are
  given. If no word has two ids, the pair is None.
""",
    hints=(
        "Write two loops, one after the other: the first counts over all words, the second replaces in "
        "all words. What does `zip(word, word[1:])` give for a word of 0, 1 and 3 ids?",
        "Count into a dict from tuples to ints. `min(pairs, key=lambda pair: (-pairs[pair], pair))` "
        "settles ties. In the second loop, use an index `i` that moves on by 2 after a replacement and by "
        "1 otherwise.",
        "`while i < len(word): if tuple(word[i:i + 2]) == best: new.append(new_id); i += 2`, "
        "`else: new.append(word[i]); i += 1`, into a fresh list for each word. Return "
        "`(None, copies)` if the dict is empty.",
    ),
    forbid=("tokenizers", "minitext.data.tokenizer"),
)


def words_and_counts(rng, ids=4, words=12, longest=9):
    lengths = rng.integers(0, longest, words)
    made = [[int(x) for x in rng.integers(10, 10 + ids, n)] for n in lengths]
    found = [list(word) for word in dict.fromkeys(map(tuple, [*made, [], [10], [11, 11, 11]]))]
    return found, [int(n) for n in rng.integers(1, 9, len(found))]


def bpe_variant(
    tie=lambda pairs: min(pairs, key=lambda pair: (-pairs[pair], pair)),
    times=lambda count: count,
    seen=lambda pairs: pairs,
    step=2,
    backwards=False,
    across=False,
    in_place=False,
    sort_words=False,
    empty=True,
):
    """A correct merge_step but for what is passed."""

    def replace(word, best, new_id):
        word = word[::-1] if backwards else word
        wanted = best[::-1] if backwards else best
        new, i = [], 0
        while i < len(word):
            if tuple(word[i : i + 2]) == wanted:
                new.append(new_id)
                i += step
            else:
                new.append(word[i])
                i += 1
        return new[::-1] if backwards else new

    def merge_step(words, counts, new_id):
        pairs = {}
        text = [[id for word in words for id in word]] if across else words
        for word, count in zip(text, [1] if across else counts, strict=True):
            for pair in seen(list(itertools.pairwise(word))):
                pairs[pair] = pairs.get(pair, 0) + times(count)
        if not pairs and empty:
            return None, [list(word) for word in words]
        best = tie(pairs)
        if in_place:
            for word in words:
                word[:] = replace(word, best, new_id)
            return best, words
        found = [replace(word, best, new_id) for word in words]
        return best, sorted(found) if sort_words else found

    return merge_step


right_merge = bpe_variant()


def same_merge(t, fn, words, counts, why, new_id=99):
    want_pair, want = right_merge(words, counts, new_id)
    pair, found = fn([list(word) for word in words], list(counts), new_id)
    pair_text = f"the pair, {why}"
    if pair is not None and tuple(pair) != want_pair:
        for one in (tuple(pair), want_pair):
            times = sum(
                n * list(itertools.pairwise(w)).count(one)
                for w, n in zip(words, counts, strict=True)
            )
            pair_text += f"; {one} occurs {times} times"
    t.equal(None if pair is None else tuple(pair), want_pair, why=pair_text)
    word_text = f"the words, {why}"
    for old, new, right in zip(words, found, want, strict=False):
        if list(new) != right:
            word_text += f"; of {old} you make {list(new)}, not {right}"
            break
    t.equal([list(word) for word in found], want, why=word_text)
    types = {type(x).__name__ for x in (found, *found)}
    t.equal(sorted(types), ["list"], why=f"the types of the words and of what they are in, {why}")
    t.equal(type(pair).__name__, type(want_pair).__name__, why=f"the type of the pair, {why}")


@bpe_merge.check("the most frequent pair")
def _(fn, t):
    # The pair that stands in most words is not the one that occurs most often.
    a, b, c, d = (int(x) for x in t.rng.permutation(20)[:4])
    words = [[a, b, c], [a, b, d], [b, a, b], [c, d]]
    same_merge(t, fn, words, [2, 1, 3, 9], "where a rare word has what a frequent word has not")
    same_merge(t, fn, [[a, b, a, b, a, b], [c, d], [d, c, d]], [2, 2, 2], "twice in one word")


@bpe_merge.check("words are words")
def _(fn, t):
    a, b, c, d = (int(x) for x in t.rng.permutation(20)[:4])
    same_merge(t, fn, [[a, b], [b], [b, c], [b, d]], [1, 1, 2, 1], "no pair across words")


@bpe_merge.check("from left to right, without overlap")
def _(fn, t):
    a, b, c = (int(x) for x in t.rng.permutation(20)[:3])
    same_merge(t, fn, [[a, a, a], [b, c]], [2, 3], "where pairs overlap")
    for n in (2, 3, 4, 5, 8):
        same_merge(t, fn, [[a] * n, [b, *[a] * n, b]], [3, 4], f"{n} times the same id")


@bpe_merge.check("ties")
def _(fn, t):
    for _ in range(6):
        a, b, c, d = sorted(int(x) for x in t.rng.permutation(20)[:4])
        others = [[[a, b], [c, d], [d, c]][k] for k in t.rng.permutation(3)]
        same_merge(t, fn, [[b, a], *others], [5, 5, 5, 5], "four pairs, 5 times each")
        same_merge(t, fn, [[a, c], [a, b], [b, c]], [5, 5, 5], "two pairs with the same first id")


@bpe_merge.check("any words, and large counts")
def _(fn, t):
    for scale in (1, 10**15):
        words, counts = words_and_counts(t.rng)
        same_merge(t, fn, words, [scale * n for n in counts], f"counts times {scale}")


@bpe_merge.check("the lists it was given stay as they are")
def _(fn, t):
    words, counts = words_and_counts(t.rng)
    before = [list(word) for word in words]
    _, found = fn(words, counts, 99)
    t.equal(words, before, why="the argument after the call")
    t.true(all(new is not old for new in found for old in words), why="a list was handed through")


@bpe_merge.check("nothing to merge")
def _(fn, t):
    for words in ([], [[]], [[7], [], [8]]):
        pair, found = fn(words, [3] * len(words), 99)
        t.equal(pair, None, why=f"the pair of {words}")
        t.equal([list(word) for word in found], words, why="the words")


@bpe_merge.check("a pair that occurs once")
def _(fn, t):
    a, b = (int(x) for x in t.rng.permutation(20)[:2])
    same_merge(t, fn, [[a, b], [a]], [1, 3], "a single pair, once")


@bpe_merge.check("twenty merges, one after the other")
def _(fn, t):
    words, counts = words_and_counts(t.rng, ids=3, words=30, longest=25)
    want = words
    for new_id in range(100, 120):
        want_pair, want = right_merge(want, counts, new_id)
        pair, words = fn(words, counts, new_id)
        t.equal(None if pair is None else tuple(pair), want_pair, why=f"merge {new_id - 99}")
    t.equal([list(word) for word in words], want, why="the words after all of them")


def wrong_merge(name, hint, **changes):
    fn = bpe_variant(**changes)
    fn.__name__ = name
    bpe_merge.mutant(hint)(fn)


wrong_merge(
    "words_count_once",
    "You count a pair once for each different word. A word that occurs a thousand times has its "
    "pairs a thousand times: add its count.",
    times=lambda count: 1,
)
wrong_merge(
    "once_in_a_word",
    "You count a pair once in a word, however often it occurs there. `zip(word, word[1:])` gives all "
    "of its pairs; don't make a set of them.",
    seen=set,
)
wrong_merge(
    "no_overlap_when_counting",
    "You don't count pairs that overlap. A word `a a a` has the pair `a a` twice, although the second "
    "loop can merge only one of the two.",
    seen=lambda pairs: [p for i, p in enumerate(pairs) if not i or p != pairs[i - 1]],
)
wrong_merge(
    "across_words",
    "You count over the whole text as one list. Then the end of one word and the beginning of the next "
    "make a pair, and words no longer count as often as they occur.",
    across=True,
)
wrong_merge(
    "first_seen",
    "Among equally frequent pairs you take the one you met first, as `max(pairs, key=pairs.get)` "
    "does. The smallest pair must win, so the order of the words doesn't matter.",
    tie=lambda pairs: max(pairs, key=pairs.get),
)
wrong_merge(
    "largest_of_a_tie",
    "Among equally frequent pairs you take the largest, perhaps as the maximum of (count, pair). "
    "Take the minimum of (-count, pair).",
    tie=lambda pairs: max(pairs, key=lambda pair: (pairs[pair], pair)),
)
wrong_merge(
    "compares_first_ids",
    "Among equally frequent pairs you compare only the first ids. Two pairs may share it, as (3, 7) and "
    "(3, 5) do, and then the second id decides: compare the tuples.",
    tie=lambda pairs: min(pairs, key=lambda pair: (-pairs[pair], pair[0])),
)
wrong_merge(
    "merges_overlap",
    "After a replacement you go on by only one id, so the pair's second id is used again. Go on by two.",
    step=1,
)
wrong_merge(
    "from_the_right",
    "You merge from the right. It makes a difference if the same id comes three times: `a a a` becomes "
    "`new a`.",
    backwards=True,
)
wrong_merge(
    "in_place",
    "You change the lists that you were given. Build a new list for each word.",
    in_place=True,
)
wrong_merge(
    "words_out_of_order",
    "Your words come back in another order. Their counts are in a separate list, so the order must "
    "stay.",
    sort_words=True,
)
wrong_merge(
    "no_pair_at_all",
    "If no word has two ids, there is no smallest or largest pair, and min() or max() raises. "
    "Return None and the words.",
    empty=False,
)


@bpe_merge.mutant(
    "Your words are tuples. The next step gets them as its `words`, which are lists: make each a list."
)
def tuples_for_words(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    return pair, [tuple(word) for word in found]


@bpe_merge.mutant(
    "Your pair is a list. Make it a tuple: pairs are keys of a tokenizer's table of merges, and a list "
    "can't be one."
)
def list_for_a_pair(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    return None if pair is None else list(pair), found


@bpe_merge.mutant(
    "You merge only the first occurrence in a word. Go on to the word's end: the pair may come again."
)
def only_the_first(words, counts, new_id):
    pair, _ = right_merge(words, counts, new_id)
    found = []
    for word in words:
        at = [i for i, p in enumerate(itertools.pairwise(word)) if p == pair][:1]
        found.append([*word[: at[0]], new_id, *word[at[0] + 2 :]] if at else list(word))
    return pair, found


wrong_merge(
    "steps_of_two",
    "You cut a word into pairs from its beginning, so only every second pair of neighbours is counted.",
    seen=lambda pairs: pairs[::2],
)
wrong_merge(
    "without_the_last_pair",
    "You don't count the last pair of a word. A word of n ids has n - 1 pairs.",
    seen=lambda pairs: pairs[:-1],
)
wrong_merge(
    "pairs_without_order",
    "You count `a b` and `b a` as the same pair. A pair has an order.",
    seen=lambda pairs: [tuple(sorted(pair)) for pair in pairs],
)


@bpe_merge.mutant(
    "A pair gets the count of the last word that has it. Add the counts of all words that have it."
)
def last_count_alone(words, counts, new_id):
    pairs = {}
    for word, count in zip(words, counts, strict=True):
        pairs.update(dict.fromkeys(itertools.pairwise(word), count))
    if not pairs:
        return right_merge(words, counts, new_id)
    best = min(pairs, key=lambda pair: (-pairs[pair], pair))
    pair, found = right_merge([list(best), *words], [10**30, *counts], new_id)
    return pair, found[1:]


@bpe_merge.mutant(
    "You replace in text: the digits of `1 2` are also in `11 2`. Compare ids, one with one."
)
def replaces_in_text(words, counts, new_id):
    pair, _ = right_merge(words, counts, new_id)
    if pair is None:
        return right_merge(words, counts, new_id)
    old = "{} {}".format(*pair)
    texts = [" ".join(map(str, word)).replace(old, str(new_id)) for word in words]
    return pair, [[int(id) for id in text.split()] for text in texts]


@bpe_merge.mutant(
    "You leave pairs that occur only once. The most frequent pair is merged, however rare it is."
)
def not_if_once(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    occurs = sum(
        n * list(itertools.pairwise(w)).count(pair) for w, n in zip(words, counts, strict=True)
    )
    return (pair, found) if occurs > 1 else (None, [list(word) for word in words])


@bpe_merge.mutant("Words without ids are missing from your result. It has a word for each word.")
def empty_words_dropped(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    return pair, [word for word in found if word]


wrong_merge(
    "rarest",
    "You take the rarest pair. The most frequent wins.",
    tie=lambda pairs: min(pairs, key=lambda pair: (pairs[pair], pair)),
)


@bpe_merge.mutant("You put the new id beside the pair. It *replaces* both ids.")
def beside_the_pair(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    return pair, [[y for x in word for y in ([x, *pair] if x == new_id else [x])] for word in found]


@bpe_merge.mutant(
    "If there is nothing to merge you return no words. Return them as they are, in new lists."
)
def no_words(words, counts, new_id):
    pair, found = right_merge(words, counts, new_id)
    return pair, None if pair is None else found


@bpe_merge.mutant("You return the words first. The pair comes first, then the words.")
def words_first(words, counts, new_id):
    return right_merge(words, counts, new_id)[::-1]


# ----------------------------------------------------------------------------------- packing

packing = Exercise(
    "07.packing",
    title="Documents into rows",
    function="pack_documents",
    minutes=25,
    points=15,
    statement="""
Write `pack_documents(documents, rows, T, eod)`. Lay the documents end to end, each followed by `eod`,
and make the first `rows` rows of this stream. Row $r$ has the stream's tokens
$rT \\ldots (r + 1)T - 1$ as inputs, and the token after each of them as its target. Return five arrays
[rows, T]:

- `tokens` and `targets`, int32.
- `segment_ids`, int32: 1, 2, ... for the documents that have a piece in this *row*. The end of
  document belongs to the document that it ends. 0 is padding.
- `positions`, int32: 0, 1, ... from the beginning of each piece. If a document goes on in the next
  row, it begins there at 0 again.
- `loss_mask`, float32: 1 if the target belongs to the same document as the input. So it's 0 at an end
  of document, and also at padding. An end of document is a target like any other.
- A slot is padding if its *target* would be past the end of the stream: all five arrays are 0 there.
  So the very last token is never an input.

A document may be empty, have one token, or be longer than a row. There may be no documents at all, and
`rows` may be more or less than the stream fills.
""",
    hints=(
        "Write the stream for the documents `5 6` and `7` by hand, and below it the five rows of "
        "numbers for T = 4. In which slots does a new piece begin? There are two ways to begin one.",
        "Put the stream into padded arrays [rows, T] first. A piece begins at slot 0 of each row and "
        "one slot after every `tokens == eod`. The running sum of the beginnings is the segment id, and "
        "the running *maximum* of their slots is where the current piece began.",
        "`begins[:, 0] = True; begins[:, 1:] = (tokens == eod)[:, :-1]`; `np.cumsum(begins, axis=1)`; "
        "`np.arange(T) - np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)`; the mask is "
        "`real & (tokens != eod)`. Then everything is 0 where it is not `real`.",
    ),
    forbid=("minitext.data",),
)

NAMES = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


def pack_variant(
    stride=0,
    keep_empty=True,
    ends=True,
    ids_per_row=True,
    first_id=1,
    end_begins=False,
    restart=True,
    rows_restart=True,
    mask=lambda tokens, targets, eod: tokens != eod,
    short=0,
    pad_from_input=False,
    clear=True,
    float_mask=True,
    kind=np.int32,
):
    """A correct pack_documents, written place by place, but for what is passed."""

    def pack_documents(documents, rows, T, eod):
        kept = [document for document in documents if document or keep_empty]
        stream = [x for document in kept for x in [*document, *[eod] * ends]]
        out = {name: np.zeros((rows, T), kind) for name in NAMES}
        document = 0
        began = 0
        for row in range(rows - short):
            segment = first_id
            if rows_restart:
                began = row * (T + stride)
            for place in range(T):
                at = row * (T + stride) + place
                if at + (not pad_from_input) >= len(stream):
                    break
                token = stream[at]
                target = stream[at + 1] if at + 1 < len(stream) else 0
                if place and stream[at - 1] == eod and not end_begins:
                    segment, began = segment + 1, at
                if place and token == eod and end_begins:
                    segment, began = segment + 1, at
                out["tokens"][row, place], out["targets"][row, place] = token, target
                out["segment_ids"][row, place] = segment if ids_per_row else first_id + document
                out["positions"][row, place] = at - began if restart else place
                out["loss_mask"][row, place] = mask(token, target, eod)
                document += token == eod
        if not clear:
            empty = out["segment_ids"] == 0
            out["positions"] = np.where(empty, np.arange(T), out["positions"]).astype(kind)
        if float_mask:
            out["loss_mask"] = out["loss_mask"].astype(np.float32)
        return out

    return pack_documents


right_pack = pack_variant()


def same_rows(t, fn, documents, rows, T, eod, why):
    want = right_pack(documents, rows, T, eod)
    got = fn([list(document) for document in documents], rows, T, eod)
    t.equal(sorted(got), sorted(want), why="the names of the arrays")
    dtypes = {name: str(np.asarray(got[name]).dtype) for name in NAMES}
    t.equal(dtypes, {name: str(want[name].dtype) for name in NAMES}, why="dtypes")
    for name in NAMES:  # under its name, so that a mistake in one is not taken for one in another
        told = slot_of_stream(np.asarray(got[name]), want, name, eod)
        t.close({name: got[name]}, {name: want[name]}, rtol=0, atol=0, why=why + told)


def slot_of_stream(got, want, name, eod):
    """What the first slot is in which an array is wrong."""
    if got.shape != want[name].shape or (got == want[name]).all():
        return ""
    row, slot = (int(i) for i in np.argwhere(got != want[name])[0])
    told = f"; the first slot that is off, [{row}, {slot}], "
    if want["segment_ids"][row, slot] == 0:
        return told + "is padding: its target would be past the end of the stream"
    if want["tokens"][row, slot] == eod:
        return told + "has an end of document as its input"
    if want["targets"][row, slot] == eod:
        return told + "has an end of document as its target"
    if slot == 0:
        within = row and want["tokens"][row - 1, -1] != eod
        return told + ("begins a row within a document" if within else "begins a row")
    if want["tokens"][row, slot - 1] == eod:
        return told + "follows an end of document"
    return told + "is within a document"


def draw_documents(rng, count, longest, eod):
    lengths = rng.integers(1, longest, count)
    return [[int(x) for x in rng.integers(0, eod, n)] for n in lengths]


@packing.check("one document in one row")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    n = int(t.rng.integers(4, 9))
    documents = [[int(x) for x in t.rng.integers(0, eod, n)]]
    same_rows(t, fn, documents, 1, n + 3, eod, f"a document of {n} in a row of {n + 3}")


@packing.check("short documents in one row")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    documents = draw_documents(t.rng, 6, 5, eod)
    same_rows(t, fn, documents, 1, 12, eod, "six documents, the first row")


@packing.check("several rows")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    documents = draw_documents(t.rng, 30, 9, eod)
    same_rows(t, fn, documents, 5, 11, eod, "thirty documents, five rows")


@packing.check("a document longer than a row")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    documents = [*draw_documents(t.rng, 2, 4, eod), [7] * 40, *draw_documents(t.rng, 3, 6, eod)]
    same_rows(t, fn, documents, 5, 8, eod, "a document of 40 in rows of 8")


@packing.check("the end of the stream, and rows of padding alone")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    documents = draw_documents(t.rng, 4, 6, eod)
    total = sum(map(len, documents)) + 4
    for T in (5, 7, total - 1, total, total + 3):
        same_rows(t, fn, documents, -(-total // T) + 2, T, eod, f"{total} tokens, T = {T}")


@packing.check("empty documents, documents of one token, no document")
def _(fn, t):
    eod = int(t.rng.integers(50, 90))
    cases = [[[], [3], [], [], [4, 5]], [[], []], [[3]], [[]], []]
    for documents in cases:
        same_rows(t, fn, documents, 3, 4, eod, f"documents {documents}")
        same_rows(t, fn, documents, 4, 1, eod, f"documents {documents}, T = 1")


def wrong_pack(name, hint, **changes):
    fn = pack_variant(**changes)
    fn.__name__ = name
    packing.mutant(hint)(fn)


wrong_pack(
    "ends_count",
    "Your loss mask is 1 at the end of a document. Its target is the first token of the next document, "
    "which nothing in this one can predict.",
    mask=lambda token, target, eod: True,
)
wrong_pack(
    "ends_are_never_learnt",
    "Your loss mask is 0 if the *target* is an end of document. Then the model never learns to stop. "
    "The mask is 0 if the *input* is one.",
    mask=lambda token, target, eod: token != eod and target != eod,
)
wrong_pack(
    "mask_at_the_target",
    "You mask the slot whose target is an end of document, and not the slot whose input is one. You "
    "are off by one.",
    mask=lambda token, target, eod: target != eod,
)
wrong_pack(
    "no_restart",
    "Your positions count the slots of the row. They begin at 0 with each document's piece.",
    restart=False,
)
wrong_pack(
    "position_of_the_document",
    "In a row that begins within a document your positions go on from the row before. They count from "
    "the beginning of the piece in *this* row.",
    rows_restart=False,
)
wrong_pack(
    "documents_of_the_stream",
    "Your segment ids go on counting from row to row. They begin with 1 in every row.",
    ids_per_row=False,
)
wrong_pack(
    "segments_from_zero",
    "Your first segment is 0, but 0 means padding. Begin with 1.",
    first_id=0,
)
wrong_pack(
    "end_belongs_to_the_next",
    "You begin a new segment at the end of document. It belongs to the document that it ends; the new "
    "segment begins one slot later.",
    end_begins=True,
)
wrong_pack(
    "a_token_lost_between_rows",
    "Your rows begin T + 1 tokens apart, so one token in every row is a target and never an input. "
    "Windows of T + 1 tokens overlap by one.",
    stride=1,
)
wrong_pack(
    "no_end_of_document",
    "You don't put `eod` after each document, so the model can't see where one ends.",
    ends=False,
)
wrong_pack(
    "no_end_of_an_empty_document",
    "You leave out empty documents. Each document is followed by `eod`, even one without tokens, so its "
    "end is in the stream.",
    keep_empty=False,
)
wrong_pack(
    "last_row_missing",
    "Your last row stays empty. The row in which the stream ends counts too: fill it up with padding.",
    short=1,
)
wrong_pack(
    "last_token_is_an_input",
    "The last token of the stream is an input in your rows, although it has no target. That slot is "
    "padding.",
    pad_from_input=True,
)
wrong_pack(
    "positions_in_the_padding",
    "Your positions go on in the padding. All five arrays are 0 there.",
    clear=False,
)
wrong_pack(
    "a_mask_of_integers",
    "Your loss mask is an array of integers. The loss multiplies by it: make it float32.",
    float_mask=False,
)
wrong_pack(
    "int64",
    "Your integer arrays are int64, NumPy's default. JAX computes in int32: pass `np.int32` where you "
    "make them.",
    kind=np.int64,
)


@packing.mutant(
    "You give each document a row of its own. Lay the documents end to end first and then cut rows from "
    "that stream, wherever they fall: a row has pieces of several documents, without gaps."
)
def a_row_for_each_document(documents, rows, T, eod):
    out = right_pack([], rows, T, eod)
    for row, document in enumerate(documents[:rows]):
        alone = right_pack([document], 1, T, eod)
        for name in NAMES:
            out[name][row] = alone[name][0]
    return out


def pack_then(name, hint, change):
    """A right answer that is changed afterwards."""

    def answer(documents, rows, T, eod):
        out = right_pack(documents, rows, T, eod)
        change(out, out["segment_ids"] > 0, eod)
        return out

    answer.__name__ = name
    packing.mutant(hint)(answer)


def pieces_of_the_stream(out, real, eod):
    most = out["segment_ids"].max(axis=1, initial=0)
    before = np.cumsum(most) - most
    out["segment_ids"] = np.where(real, out["segment_ids"] + before[:, None], 0).astype(np.int32)


def targets_like_inputs(out, real, eod):
    out["targets"] = out["tokens"].copy()


def targets_of_the_row(out, real, eod):
    out["targets"] = np.roll(out["tokens"], -1, axis=1)


def previous_targets(out, real, eod):
    flat = np.roll(out["tokens"].reshape(-1), 1)
    out["targets"] = np.where(real, flat.reshape(real.shape), 0).astype(np.int32)


def padded_with_ends(out, real, eod):
    for name in ("tokens", "targets"):
        out[name] = np.where(real, out[name], eod).astype(np.int32)


def mask_of_padding_alone(out, real, eod):
    out["loss_mask"] = np.ones(real.shape, np.float32)


def boolean_mask(out, real, eod):
    out["loss_mask"] = out["loss_mask"] > 0


def mask_upside_down(out, real, eod):
    out["loss_mask"] = 1 - out["loss_mask"]


def positions_from_one(out, real, eod):
    out["positions"] = np.where(real, out["positions"] + 1, 0).astype(np.int32)


for change, hint in (
    (
        pieces_of_the_stream,
        "Your segment ids count the pieces of all rows together. They begin with 1 in every row.",
    ),
    (
        targets_like_inputs,
        "Your targets are the inputs themselves. The target of a slot is the token *after* it in the "
        "stream.",
    ),
    (
        targets_of_the_row,
        "You shift each row to make its targets. The last slot's target is the first token of the next "
        "row, not of the same one: take the targets from the stream.",
    ),
    (previous_targets, "Your targets are the tokens before the inputs. They come after them."),
    (padded_with_ends, "You pad with `eod`. Where there is padding all five arrays are 0."),
    (
        mask_of_padding_alone,
        "Your loss mask is 1 everywhere. It's 0 at padding and where the input is an end of document.",
    ),
    (boolean_mask, "Your loss mask is boolean. The loss multiplies by it: make it float32."),
    (mask_upside_down, "Your loss mask is the wrong way round: 1 marks what is learnt."),
    (positions_from_one, "Your positions begin at 1. A piece's first position is 0."),
):
    pack_then(change.__name__, hint, change)


@packing.mutant("You put `eod` before each document. It comes after the document that it ends.")
def ends_come_first(documents, rows, T, eod):
    turned = [x for document in documents for x in (eod, *document)]
    flat = np.zeros(rows * T + 1, np.int64)
    flat[: len(turned)] = turned[: rows * T + 1]
    out = right_pack(documents, rows, T, eod)
    real = out["segment_ids"].reshape(-1) > 0
    for name, begin in (("tokens", 0), ("targets", 1)):
        piece = np.where(real, flat[begin : begin + rows * T], 0)
        out[name] = piece.reshape(rows, T).astype(np.int32)
    return out


# ----------------------------------------------------------------------------- process_shard

process_shard = Exercise(
    "07.process_shard",
    title="Which rows this process reads",
    function="rows_of_process",
    minutes=15,
    points=10,
    statement="""
Global batch $k$ is rows $kB \\ldots (k + 1)B - 1$ of the data, however many processes there are. Write
`rows_of_process(k, B, process, count, total)`: the numbers of the rows that one of them reads.

- The processes share the $B$ slots of the batch in contiguous pieces, in order: joined from process 0
  to the last, their rows are the batch.
- If `count` doesn't divide $B$, the first $B \\bmod$ `count` processes take one row more than the
  others. If there are more processes than rows, some take none.
- The data ends after `total` rows. The slots of the last batch are dealt as always, and a slot without
  a row gets -1. So every process has an array of the same shape in every batch.
- `k` may be large: all arithmetic is in integers.
""",
    hints=(
        "Forget k and total first: which *slots* 0 ... B - 1 of a batch does a process take? Write them "
        "down for B = 7 and 3 processes.",
        "`share, more = divmod(B, count)`. The processes before process p have p shares in all, and one "
        "more row for each of them that is below `more`: `min(p, more)` rows.",
        "`first = process * share + min(process, more)`, `last = first + share + (process < more)`, "
        "`rows = k * B + np.arange(first, last)`, and `np.where(rows < total, rows, -1)`.",
    ),
    forbid=("minitext.data",),
)


def shard_variant(
    places=None,
    batch=lambda k, B, count: k * B,
    end=lambda rows, total: np.where(rows < total, rows, -1),
    exact=True,
    deal_what_is_left=False,
):
    """A correct rows_of_process but for what is passed."""

    def fair(B, process, count):
        share, more = divmod(B, count)
        first = process * share + min(process, more)
        return np.arange(first, first + share + (process < more), dtype=np.int64)

    def rows_of_process(k, B, process, count, total):
        begin = batch(k, B, count)
        if deal_what_is_left:
            B = max(0, min(B, total - begin))
        found = (places or fair)(B, process, count)
        rows = begin + found if exact else (np.float32(begin) + found).astype(np.int64)
        return end(rows, total)

    return rows_of_process


right_shard = shard_variant()


def same_shards(t, fn, k, B, count, total, why):
    # All of them at once: two mistakes may give one process the same rows.
    got = {process: fn(k, B, process, count, total) for process in range(count)}
    want = {process: right_shard(k, B, process, count, total) for process in range(count)}
    where = f"by process, of {count}, batch {k} of {B} rows, {why}"
    sizes = [[np.size(x[process]) for process in range(count)] for x in (got, want)]
    first = [next((int(r) for r in np.ravel(x[0])[:1]), -1) for x in (got, want)]
    if sizes[0] != sizes[1] and count <= 8:
        where += "; your processes take {} rows, the right ones {}".format(*sizes)
    elif first[0] != first[1]:
        where += f"; the batch begins with row {first[1]}, yours with {first[0]}"
    elif sizes[0] == sizes[1] and count > 1:
        off = next((p for p in range(count) if not np.array_equal(got[p], want[p])), 0)
        where += f"; the processes before process {off} take {sum(sizes[1][:off])} rows"
        where += ", and the data ends in its piece" * bool(np.any(want[off] < 0))
    for process, rows in got.items():
        right = want[process]
        if B <= 12 and np.shape(rows) != right.shape:
            where += f"; process {process} reads {np.asarray(rows).tolist()}, not {right.tolist()}"
            break
    t.close(got, want, rtol=0, atol=0, why=where, dtype=np.int64)


@process_shard.check("the first batch")
def _(fn, t):
    B = 12 * int(t.rng.integers(1, 4))
    for count in (1, 2, 3, 4):
        same_shards(t, fn, 0, B, count, 10**6, "plenty of data")


@process_shard.check("later batches")
def _(fn, t):
    for count in (1, 3, 6):
        same_shards(t, fn, int(t.rng.integers(3, 99)), 12, count, 10**6, "plenty of data")


@process_shard.check("a number of processes that does not divide")
def _(fn, t):
    for B, count in (
        (8, 3),
        (7, 3),
        (9, 4),
        (5, 8),
        (1, 3),
        (int(t.rng.integers(20, 40)) * 6 + 1, 6),
    ):
        same_shards(t, fn, int(t.rng.integers(0, 5)), B, count, 10**6, "plenty of data")


@process_shard.check("disjoint and complete")
def _(fn, t):
    B, total = int(t.rng.integers(13, 40)), 400
    for count in (1, 2, 5, 7, 50):
        got = [
            row
            for k in range(-(-total // B))
            for process in range(count)
            for row in np.asarray(fn(k, B, process, count, total)).tolist()
            if row >= 0
        ]
        why = f"all rows in order, {count} processes, batches of {B}, {total} rows in all"
        found = {
            "no process reads row {}": sorted(set(range(total)) - set(got)),
            "row {} is read, which the data hasn't": sorted(set(got) - set(range(total))),
            "row {} is read twice": sorted(row for row in set(got) if got.count(row) > 1),
        }
        why += "".join(f"; {text.format(rows[0])}" for text, rows in found.items() if rows)
        t.close(got, np.arange(total), rtol=0, atol=0, why=why)


@process_shard.check("the end of the data")
def _(fn, t):
    B = int(t.rng.integers(8, 20))
    total = 5 * B + int(t.rng.integers(2, B // 2 + 1))
    for count in (2, 3, B, 1):
        same_shards(t, fn, 5, B, count, total, f"{total} rows in all")
        same_shards(t, fn, 6, B, count, total, "all of it past the end")


@process_shard.check("far into the data")
def _(fn, t):
    # Odd and above 2^53, so no float holds it.
    k = 9 * 10**16 + 2 * int(t.rng.integers(1, 1000)) + 1
    same_shards(t, fn, k, 96, 5, 9 * 10**18, "k is large")


def wrong_shard(name, hint, **changes):
    fn = shard_variant(**changes)
    fn.__name__ = name
    process_shard.mutant(hint)(fn)


wrong_shard(
    "every_process_its_own_data",
    "Your rows begin at k times the rows of *this process*. All processes then read the beginning of "
    "the data, and the batch depends on their number. It begins at k B.",
    batch=lambda k, B, count: k * (B // count),
)
wrong_shard(
    "no_batch",
    "You return slots of the batch. Add k B.",
    batch=lambda k, B, count: 0,
)
wrong_shard(
    "strided",
    "You deal the rows one by one, every `count`-th to a process. That is disjoint and complete, but "
    "joined in the order of the processes it isn't the batch.",
    places=lambda B, process, count: np.arange(process, B, count, dtype=np.int64),
)
wrong_shard(
    "rows_left_over",
    "You give each process B // count rows. If that doesn't divide, no process reads the last rows.",
    places=lambda B, process, count: process * (B // count) + np.arange(B // count, dtype=np.int64),
)
wrong_shard(
    "rounded_up",
    "You give each process B / count rows, rounded up. The last ones are then left with fewer, or with "
    "none. The first B mod count have one more, all others B // count.",
    places=lambda B, process, count: np.arange(
        min(B, process * -(-B // count)), min(B, (process + 1) * -(-B // count)), dtype=np.int64
    ),
)
wrong_shard(
    "more_for_the_last",
    "You give what is left over to the last processes. It goes to the first.",
    places=lambda B, process, count: np.arange(
        process * B // count, (process + 1) * B // count, dtype=np.int64
    ),
)
wrong_shard(
    "all_that_is_left_to_the_last",
    "You give all rows that are left over to the last process, which then has up to twice as much to do. "
    "The first B mod count processes take one row more each.",
    places=lambda B, process, count: np.arange(
        process * (B // count),
        (process + 1) * (B // count) if process < count - 1 else B,
        dtype=np.int64,
    ),
)
wrong_shard(
    "short_arrays",
    "You leave out the rows past the end. Then the array's shape changes in the last batch, and the "
    "step is compiled again. Put -1 there.",
    end=lambda rows, total: rows[rows < total],
)
wrong_shard(
    "past_the_end",
    "You don't look at `total`. There are no rows from `total` on: put -1 there.",
    end=lambda rows, total: rows,
)
wrong_shard(
    "begins_anew",
    "Past the end you begin again with row 0. That is the next epoch, which has another order. Put -1 "
    "there.",
    end=lambda rows, total: rows % total,
)
wrong_shard(
    "what_is_left_is_dealt",
    "In the last batch you deal out the rows that are left. Deal the slots of the batch as always, so "
    "every process keeps its shape and some slots get -1.",
    deal_what_is_left=True,
)
wrong_shard(
    "in_float32",
    "You compute row numbers in floating point. Beyond 2^24 (float32) or 2^53 (float64) they are "
    "rounded. Stay in integers.",
    exact=False,
)

wrong_shard(
    "one_row_past_the_end",
    "Row number `total` doesn't exist: rows are counted from 0. Put -1 there too.",
    end=lambda rows, total: np.where(rows <= total, rows, -1),
)
wrong_shard(
    "last_row_left_out",
    "The last row of the data is number total - 1, and you put -1 there.",
    end=lambda rows, total: np.where(rows < total - 1, rows, -1),
)
wrong_shard(
    "the_last_row_again",
    "Past the end you repeat the last row. Put -1 there.",
    end=lambda rows, total: np.minimum(rows, total - 1),
)
wrong_shard(
    "zeros_past_the_end",
    "Past the end you put 0, which is a row. Put -1 there.",
    end=lambda rows, total: np.where(rows < total, rows, 0),
)
wrong_shard(
    "a_list",
    "You return a list. An array of int64 is asked for.",
    end=lambda rows, total: [int(row) if row < total else -1 for row in rows],
)
wrong_shard(
    "int32",
    "Your rows are int32. There may be more than two billion: make them int64.",
    end=lambda rows, total: np.where(rows < total, rows, -1).astype(np.int32),
)
wrong_shard(
    "batches_from_one",
    "Your first batch is batch 1. k counts from 0: batch k begins at row k B.",
    batch=lambda k, B, count: (k + 1) * B,
)
wrong_shard(
    "whole_batch",
    "Every process reads the whole batch. They share its slots.",
    places=lambda B, process, count: np.arange(B, dtype=np.int64),
)


# ------------------------------------------------------------------------------------ resume

resume = Exercise(
    "07.resume",
    title="An iterator that can be resumed",
    function="ShuffledRows",
    minutes=25,
    points=10,
    statement="""
Write the class `ShuffledRows(rows, seed)`, an iterator over row numbers that never ends. Epoch
$e = 0, 1, \\ldots$ has every row once, in the order
`np.random.default_rng([seed, e]).permutation(rows)`.

- `get_state()` returns the current resume point, as values that JSON can hold. `set_state(state)` goes
  there, forwards or back, in the same object or in another one made with the same arguments. The rows
  from there on equal those that the first iterator went on to give.
- The state is small. It doesn't grow with the number of rows or with the rows taken so far.
- A state that you have returned doesn't change when the iterator goes on or is asked again.
- Row numbers are Python ints, which JSON can hold too.
- `set_state` costs no more than one permutation. A run may be resumed in its millionth epoch.
- An epoch is permuted once, not once for each row.
""",
    hints=(
        "The order of any epoch can be computed from scratch. So what is the least that you must "
        "remember to know which row comes next?",
        "One integer: how many rows have been taken. `divmod(taken, rows)` is the epoch and the index in "
        "it. Also keep the permutation of the current epoch, but as a cache that isn't part of the "
        "state.",
        "In `__next__`: `epoch, index = divmod(self.taken, self.rows)`; if `epoch` is not the one whose "
        "order you hold, compute it; add 1 to `taken`; return `int(self.order[index])`. `get_state` "
        'returns `{"taken": self.taken}`.',
    ),
    seconds=30.0,
    forbid=("minitext.data", "grain"),
)


class CorrectRows:
    """The order, with the state as one number; variants override a method."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.taken = rows, seed, 0
        self.held = None

    def __iter__(self):
        return self

    def order(self, epoch):
        return np.random.default_rng([self.seed, epoch]).permutation(self.rows)

    def __next__(self):
        epoch, place = divmod(self.taken, self.rows)
        if self.held is None or self.held[0] != epoch:
            self.held = epoch, self.order(epoch)
        self.taken += 1
        return int(self.held[1][place])

    def get_state(self):
        return {"taken": self.taken}

    def set_state(self, state):
        self.taken = state["taken"]


@contextlib.contextmanager
def generators():
    """A list that grows with each generator that is made."""
    made, real = [], np.random.default_rng

    def counting(*args, **kwargs):
        made.append(args)
        return real(*args, **kwargs)

    np.random.default_rng = counting
    try:
        yield made
    finally:
        np.random.default_rng = real


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def right_rows(rows, seed, first, count):
    it = CorrectRows(rows, seed)
    it.taken = first
    return np.array(take(it, count))


def carried(t, it):
    state = it.get_state()
    t.true(state is not None, why="get_state() returns None, so nothing is left for another object")
    return json.loads(json.dumps(state))


def orders_of(rows, seed, e):
    """Orders that an epoch has by mistake, with what to say."""
    before, one = np.arange(rows), np.random.default_rng([seed, 0])
    for epoch in range(e + 1):
        np.random.default_rng([seed, epoch]).shuffle(before)
        drawn = one.permutation(rows)
    old = np.random.RandomState((seed + e) % 2**32).permutation(rows)
    return {
        "which shuffles the order of the epoch before: begin with 0, 1, 2, ... each time": before,
        "which one generator draws after the epoch before: make a new one for each epoch": drawn,
        "which is from NumPy's old generator": old,
        "which is 0, 1, 2, ...: shuffle it": np.arange(rows),
    }


def rows_told(got, rows, seed, first):
    """What the first wrong row of some has in common with the right ones."""
    want = right_rows(rows, seed, first, len(got))
    if len(want) != len(got) or (want == np.array(got)).all():
        return ""
    strange = next((row for row in got if row not in range(rows)), None)
    if strange is not None:
        return f"; {strange!r} is none of the rows 0 ... {rows - 1}"
    off = int(np.flatnonzero(want != np.array(got))[0])
    epoch, index = divmod(first + off, rows)
    begins = off - index
    some, told = got[off : off + 6], f"; the first wrong one is index {index} of epoch {epoch}"
    long = right_rows(rows, seed, 0, first + 4 * rows).tolist()
    found = [i for i in range(len(long)) if long[i : i + len(some)] == some and len(some) > 3]
    if found:
        at = min(found, key=lambda i: abs(i - first - off))
        return f"{told}, where you give what belongs to index {at % rows} of epoch {at // rows}"
    whole = got[begins : begins + rows]
    if begins < 0 or len(whole) < rows:
        return told
    twice = next((row for row in whole if whole.count(row) > 1), None)
    if twice is not None:
        return f"{told}; this epoch of yours has row {twice} twice, and another row not at all"
    order = "another order than that of its generator"
    for text, wrong in orders_of(rows, seed, epoch).items():
        if wrong.tolist() == whole:
            order = f"an order {text}"
    return f"{told}; this epoch of yours has every row once, in {order}"


def rows_from(t, got, rows, seed, first, why):
    why += rows_told(got, rows, seed, first)
    t.close(got, right_rows(rows, seed, first, len(got)), atol=0, why=why)


@resume.check("one epoch")
def _(fn, t):
    rows, seed = int(t.rng.integers(20, 60)), int(t.rng.integers(1, 1000))
    got = take(iter(fn(rows, seed)), rows)
    rows_from(t, got, rows, seed, 0, f"{rows} rows, seed {seed}")
    kinds = sorted({type(row).__name__ for row in got})
    t.equal(kinds, ["int"], why="the types of the row numbers")


@resume.check("the epochs after it")
def _(fn, t):
    for rows in (int(t.rng.integers(20, 60)), 2, 1):
        seed = int(t.rng.integers(1, 1000))
        rows_from(t, take(fn(rows, seed), 4 * rows), rows, seed, 0, f"four epochs of {rows} rows")


@resume.check("resumed in another object")
def _(fn, t):
    rows, seed = int(t.rng.integers(20, 40)), int(t.rng.integers(1, 1000))
    for taken in (1, rows // 2, rows - 1, 0, rows, rows + 1, rows + 5, 3 * rows):
        running = fn(rows, seed)
        take(running, taken)
        state = carried(t, running)
        resumed = fn(rows, seed)
        resumed.set_state(state)
        got = take(resumed, 2 * rows)
        rows_from(t, got, rows, seed, taken, f"resumed after {taken} of {rows} rows")
        rows_from(t, take(running, 5), rows, seed, taken, "the first iterator, going on")


@resume.check("forwards and back in one object")
def _(fn, t):
    rows, seed = int(t.rng.integers(20, 40)), int(t.rng.integers(1, 1000))
    it, states = fn(rows, seed), {}
    for at in range(3 * rows):
        states[at] = carried(t, it)
        next(it)
    before = f"row {3 * rows - 1}"
    for at in t.rng.permutation(3 * rows)[:9].tolist():
        it.set_state(states[at])
        rows_from(t, take(it, rows), rows, seed, at, f"after {before} it went to row {at}")
        before = f"row {at + rows - 1}"


@resume.check("a state handed out does not change")
def _(fn, t):
    rows, seed = int(t.rng.integers(20, 40)), int(t.rng.integers(1, 1000))
    it = fn(rows, seed)
    take(it, 7)
    state = it.get_state()
    before = json.dumps(state)
    take(it, 9)
    t.equal(json.dumps(state), before, why="the state, nine rows later")
    it.get_state()
    again = {"asked again": json.dumps(state)}
    t.equal(again, {"asked again": before}, why="the first state, after another was asked for")
    it.set_state(state)
    take(it, 3)
    t.equal(json.dumps(state), before, why="the state that was set, three rows later")


@resume.check("the state is small")
def _(fn, t):
    for rows, taken in ((10, 3), (20_000, 3), (10, 5000)):
        it = fn(rows, 5)
        take(it, taken)
        size = len(json.dumps(it.get_state()))
        why = f"{size} characters for {rows} rows of which {taken} were taken"
        t.true(size < 200, why=why, observed=[size > 200, rows, taken])


@resume.check("an epoch is permuted once")
def _(fn, t):
    rows = 30_000
    it = fn(rows, int(t.rng.integers(1, 1000)))
    with generators() as drawn:
        take(it, 50)
    t.true(len(drawn) <= 2, why=f"{len(drawn)} generators for 50 rows", observed=len(drawn))


@resume.check("going to a resume point costs one permutation")
def _(fn, t):
    rows, seed = int(t.rng.integers(20, 40)), int(t.rng.integers(1, 1000))
    taken = 7 * rows + int(t.rng.integers(2, rows - 2))
    running = fn(rows, seed)
    take(running, taken)
    state, resumed = carried(t, running), fn(rows, seed)
    with generators() as drawn:
        resumed.set_state(state)
        row = next(resumed)
    t.equal(row, int(right_rows(rows, seed, taken, 1)[0]), why=f"row {taken} of epochs of {rows}")
    why = f"{len(drawn)} permutations to go to epoch 7, where one is enough"
    t.true(len(drawn) <= 1, why=why, observed=len(drawn))


@resume.mutant(
    "Every epoch of yours has the same order. Put the epoch into the seed: "
    "`np.random.default_rng([seed, epoch])`."
)
class SameOrder(CorrectRows):
    def order(self, epoch):
        return super().order(0)


@resume.mutant(
    "You seed with seed + epoch. Then epoch 1 of seed 0 is epoch 0 of seed 1. Seed with the list "
    "[seed, epoch]."
)
class SumOfSeeds(CorrectRows):
    def order(self, epoch):
        return np.random.default_rng(self.seed + epoch).permutation(self.rows)


@resume.mutant(
    "You draw all epochs' orders from one generator. Then epoch e needs all epochs before it, and a "
    "resumed iterator starts its generator from the beginning. Make a generator for each epoch, from [seed, epoch]."
)
class OneGenerator(CorrectRows):
    def __init__(self, rows, seed):
        super().__init__(rows, seed)
        self.generator = np.random.default_rng([seed, 0])

    def order(self, epoch):
        return self.generator.permutation(self.rows)


@resume.mutant(
    "You resume at the beginning of the epoch: the state holds the epoch but not the index in it. Rows "
    "taken before the stop come again."
)
class EpochOnly(CorrectRows):
    def get_state(self):
        return {"epoch": self.taken // self.rows}

    def set_state(self, state):
        self.taken = state["epoch"] * self.rows


@resume.mutant(
    "Your state holds the index in the epoch but not the epoch. After a stop the order is that of epoch 0 "
    "again."
)
class PlaceOnly(CorrectRows):
    def get_state(self):
        return {"place": self.taken % self.rows}

    def set_state(self, state):
        self.taken = state["place"]


@resume.mutant(
    "You keep the old epoch's order after set_state. The resume point may be in another epoch: compute "
    "the order of that epoch."
)
class OldOrder(CorrectRows):
    def __next__(self):
        place = self.taken % self.rows
        if self.held is None or place == 0:
            self.held = self.taken // self.rows, self.order(self.taken // self.rows)
        self.taken += 1
        return int(self.held[1][place])


@resume.mutant(
    "You go to the right index of the wrong epoch's order. `set_state` must also make that epoch's "
    "permutation."
)
class OrderNotMade(CorrectRows):
    """Holds epoch, place and order, and makes the next order at the end of each epoch."""

    def __init__(self, rows, seed):
        super().__init__(rows, seed)
        self.epoch, self.place, self.now = 0, 0, self.order(0)

    def __next__(self):
        if self.place == self.rows:
            self.epoch, self.place = self.epoch + 1, 0
            self.now = self.order(self.epoch)
        self.place += 1
        return int(self.now[self.place - 1])

    def get_state(self):
        return {"epoch": self.epoch, "place": self.place}

    def set_state(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


@resume.mutant(
    "You step through all rows up to the resume point. Any epoch's order can be made directly."
)
class WalksThere(CorrectRows):
    def set_state(self, state):
        self.taken = 0
        take(self, state["taken"])


@resume.mutant(
    "You resume one row too late. If the state is the number of rows taken, that is also the number of "
    "the next row: don't add 1."
)
class OneLate(CorrectRows):
    def set_state(self, state):
        self.taken = state["taken"] + 1


@resume.mutant(
    "Your state holds the order of the epoch. It can be computed from the seed and the epoch, and for a "
    "billion rows it would be larger than the model."
)
class OrderInTheState(CorrectRows):
    def get_state(self):
        return {"taken": self.taken, "order": self.order(self.taken // self.rows).tolist()}


@resume.mutant(
    "Your state lists the rows that were taken, so it grows. As the order is known, their number is enough."
)
class ListOfTaken(CorrectRows):
    def get_state(self):
        return {"taken": right_rows(self.rows, self.seed, 0, self.taken).tolist()}

    def set_state(self, state):
        self.taken = len(state["taken"])


@resume.mutant(
    "You return the dict that the iterator itself goes on with. Return a new one from get_state, and "
    "copy the one that set_state is given."
)
class SharedState(CorrectRows):
    def __init__(self, rows, seed):
        self.state = {"taken": 0}
        super().__init__(rows, seed)

    @property
    def taken(self):
        return self.state["taken"]

    @taken.setter
    def taken(self, value):
        self.state["taken"] = value

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@resume.mutant(
    "`get_state` fills the same dict each time and returns it, so the states it returned before change "
    "too. Return a new dict."
)
class OneDict(CorrectRows):
    def __init__(self, rows, seed):
        super().__init__(rows, seed)
        self.state = {}

    def get_state(self):
        self.state["taken"] = self.taken
        return self.state


@resume.mutant(
    "Your row numbers are NumPy integers, as in the permutation. JSON can't hold them: return `int(...)`."
)
class NumpyIntegers(CorrectRows):
    def __next__(self):
        return np.int64(super().__next__())


@resume.mutant(
    "You permute all rows again for each row that you return. Keep the order of the current epoch; it "
    "isn't part of the state."
)
class PermutedEachTime(CorrectRows):
    def __next__(self):
        self.held = None
        return super().__next__()


@resume.mutant(
    "Your iterator ends with its first epoch. It never ends: the next epoch follows, in another order."
)
class OneEpoch(CorrectRows):
    def __next__(self):
        if self.taken == self.rows:
            raise StopIteration
        return super().__next__()


@resume.mutant(
    "You resume one row too early: the last row taken comes again. The state has to name the *next* row."
)
class OneEarly(CorrectRows):
    def set_state(self, state):
        self.taken = max(state["taken"] - 1, 0)


@resume.mutant(
    "You seed with the epoch alone, or with the seed alone. Each order depends on both: `[seed, epoch]`."
)
class EpochForSeed(CorrectRows):
    def order(self, epoch):
        return np.random.default_rng(epoch).permutation(self.rows)


@resume.mutant("You seed with [epoch, seed]. The seed comes first: `[seed, epoch]`.")
class SeedsTurnedRound(CorrectRows):
    def order(self, epoch):
        return np.random.default_rng([epoch, self.seed]).permutation(self.rows)


@resume.mutant("You count the epochs from 1. The first is epoch 0.")
class EpochsFromOne(CorrectRows):
    def order(self, epoch):
        return super().order(epoch + 1)


@resume.mutant(
    "You return the rows as they are numbered. An epoch has them in the order of its permutation."
)
class NotShuffled(CorrectRows):
    def order(self, epoch):
        return np.arange(self.rows)


@resume.mutant(
    "Your state isn't something JSON can hold. An array, a generator or a NumPy integer can't be written: "
    "return plain ints."
)
class ArraysInTheState(CorrectRows):
    def get_state(self):
        return {"taken": np.int64(self.taken)}

    def set_state(self, state):
        self.taken = int(state["taken"])


@resume.mutant(
    "After set_state the order that `__next__` reads is missing: a new object has none yet. Make the "
    "order in `set_state`, or when the first row is asked for."
)
class OrderMissing(CorrectRows):
    def set_state(self, state):
        super().set_state(state)
        self.held = state["taken"] // self.rows, None


# ----------------------------------------------------------------------------------- mixture

mixture = Exercise(
    "07.mixture",
    title="Exact shares, without a state",
    function="row_of_mixture",
    minutes=35,
    points=15,
    statement="""
Write `row_of_mixture(weights, i)`, which returns two Python ints: the part that row $i$ of a mixture
comes from, and the number of the row in that part. Let $W$ be the sum of the weights $w_p$. The rule is
a timetable, with one slot for each row of the mixture:

- Row $j$ of part $p$ *may come* in slot $\\lfloor jW / w_p \\rfloor$ or later, and must come *before* slot
  $\\lceil (j + 1)W / w_p \\rceil$, its deadline.
- Look at the parts whose next row may come in a slot. The part with the earliest deadline gets the
  slot; if there are several, the one with the lowest number.

It follows that each part gives its rows 0, 1, 2, ... in order. After any number of rows $n$, part $p$ has
given $n w_p / W$ of them, to within less than one row, however many parts there are. (You needn't prove
it. The checks count.)

- Weights are integers of at least 1, with a sum below a thousand. `i` may be above $10^{18}$, so use no
  floating point, and no loop over all rows before `i`.
- The function has no memory: it may be asked for any rows in any order.
""",
    hints=(
        "After W rows every part has had exactly its weight. What does the timetable look like from "
        "there on? So `divmod(i, W)` leaves you with a slot below W.",
        "Loop over the slots 0 ... `slot` with a list `taken` of the rows that each part has given. The "
        "next row of part p is `taken[p]`. List the parts that may come, and take the `min` with a key; "
        "`min` takes the first of several.",
        "May come: `taken[p] * W // w <= n`. Deadline: `-(-(taken[p] + 1) * W // w)`, which is division "
        "rounded up. After the loop: `part, rounds * weights[part] + taken[part] - 1`.",
    ),
    seconds=60.0,
    forbid=("grain", "minitext.data"),
)


def timetable(weights, places, may=None, due=None, tie=1):
    """Parts and rows of the first places by the rule, or by a wrong one."""
    W = sum(weights)
    may = may or (lambda taken, w, n: taken * W // w <= n)
    due = due or (lambda taken, w: -(-(taken + 1) * W // w))
    taken, found = [0] * len(weights), []
    for n in range(places):
        able = [p for p, w in enumerate(weights) if may(taken[p], w, n)]
        part = min(able, key=lambda p: (due(taken[p], weights[p]), tie * p))
        found.append((part, taken[part]))
        taken[part] += 1
    return found


def by_table(weights, i, **changes):
    rounds, place = divmod(i, sum(weights))
    part, row = timetable(weights, place + 1, **changes)[place]
    return part, rounds * weights[part] + row


def asked(fn, weights, rows):
    found = [fn(list(weights), int(i)) for i in rows]
    return [(int(part), int(row)) for part, row in found]


def same_mixture(t, fn, weights, rows, why):
    rows = [int(i) for i in rows]
    table = timetable(weights, sum(weights))
    want = []
    for i in rows:
        part, row = table[i % sum(weights)]
        want.append((part, i // sum(weights) * weights[part] + row))
    got = asked(fn, weights, rows)
    turns = ""
    if got != want:
        parts = [" ".join(str(part) for part, _ in found[:16]) for found in (got, want)]
        turns = f"; your parts begin {parts[0]}, the right ones {parts[1]}"
        off = next(n for n, (g, w) in enumerate(zip(got, want, strict=True)) if g != w)
        turns += slot_told(weights, rows[off], got[off], want[off])
    t.equal(got, want, why=f"weights {weights}, {why}{turns}")


def slot_told(weights, i, got, want):
    """What the rule says of a row that is wrong."""
    if got[0] == want[0]:
        return (
            f"; before row {i} part {want[0]} has given {want[1]} rows, so its row {want[1]} comes"
        )
    slot = i % (W := sum(weights))
    before = [part for part, _ in timetable(weights, slot + 1)[:slot]]

    def times(part):
        taken = before.count(part)
        return taken * W // weights[part], -(-(taken + 1) * W // weights[part])

    if got[0] not in range(len(weights)):
        return f"; there is no part {got[0]}"
    (may, due), (_, right) = times(got[0]), times(want[0])
    told = f"; slot {slot} goes to part {want[0]}, whose deadline is {right}, not to part {got[0]}"
    if may > slot:
        return f"{told}, whose next row may come from slot {may} on"
    return f"{told}, whose deadline is {due}" + ", because of the lower number" * (due == right)


def draw_weights(rng, parts, largest=9):
    return [int(w) for w in rng.integers(1, largest, parts)]


@mixture.check("two parts")
def _(fn, t):
    for weights in ([3, 1], [1, int(t.rng.integers(4, 9))], [5, 5]):
        same_mixture(t, fn, weights, range(sum(weights)), "the first round")
    kinds = [type(x).__name__ for x in fn([3, 1], 2)]
    t.equal(kinds, ["int", "int"], why="the types of part and row")


@mixture.check("after one round")
def _(fn, t):
    for weights in ([3, 1], [2, 7]):
        same_mixture(t, fn, weights, range(4 * sum(weights)), "four rounds")


@mixture.check("one part, and equal parts")
def _(fn, t):
    same_mixture(t, fn, [int(t.rng.integers(2, 9))], range(20), "one part")
    same_mixture(t, fn, [4, 4, 4], range(24), "three equal parts")


@mixture.check("many parts")
def _(fn, t):
    drawn = [draw_weights(t.rng, int(t.rng.integers(3, 8))) for _ in range(5)]
    for weights in ([14, 4, 12, 10, 1, 18], [3, 4, 5], [1, 2, 3, 5, 7], *drawn):
        same_mixture(t, fn, weights, range(2 * sum(weights)), "two rounds")


@mixture.check("every prefix has its shares")
def _(fn, t):
    for weights in ([14, 4, 12, 10, 1, 18], [18, 10, 12, 19, 14], draw_weights(t.rng, 6, 15)):
        W, counts, worst = sum(weights), [0] * len(weights), 0.0
        for n, (part, row) in enumerate(asked(fn, weights, range(W + 5)), 1):
            t.equal(row, counts[part], why=f"the row of part {part}, weights {weights}")
            counts[part] += 1
            worst = max(worst, *(abs(c - n * w / W) for c, w in zip(counts, weights, strict=True)))
        why = f"some part is {worst:.2f} rows from its share, weights {weights}"
        t.true(worst < 1, why=why, observed=worst)


@mixture.check("rows in any order")
def _(fn, t):
    weights = draw_weights(t.rng, 4)
    rows = t.rng.permutation(3 * sum(weights)).tolist()
    same_mixture(t, fn, weights, rows, "asked in a random order")
    same_mixture(t, fn, weights, rows, "asked once more")


@mixture.check("rows above 10^18")
def _(fn, t):
    for weights in ([3, 1], draw_weights(t.rng, 5)):
        first = 10**18 + int(t.rng.integers(0, 10**9))
        same_mixture(t, fn, weights, range(first, first + 12), "far away")


@mixture.mutant(
    "You deal whole blocks: all rows of the first part, then all of the second. The shares are right "
    "only after W rows. Each part's rows must be spread over the round."
)
def blocks(weights, i):
    rounds, place = divmod(i, sum(weights))
    part = 0
    while place >= weights[part]:
        place -= weights[part]
        part += 1
    return part, rounds * weights[part] + place


@mixture.mutant(
    "You take the parts in turn, which gives equal shares. A part that has had its weight must not come "
    "again, and then the others come too early."
)
def in_turn(weights, i):
    rounds, place = divmod(i, sum(weights))
    taken, p = [0] * len(weights), 0
    for _ in range(place + 1):
        while taken[p % len(weights)] == weights[p % len(weights)]:
            p += 1
        part = p % len(weights)
        taken[part] += 1
        p += 1
    return part, rounds * weights[part] + taken[part] - 1


@mixture.mutant(
    "You draw the part at random, by weight. Then the shares are right only on average: after n rows "
    "they are off by about the root of n."
)
def at_random(weights, i):
    draw = np.random.default_rng(0).random(i % (20 * sum(weights)) + 1)
    bounds = np.cumsum(weights) / sum(weights)
    parts = np.searchsorted(bounds, draw, side="right")
    return int(parts[-1]), int((parts == parts[-1]).sum()) - 1


@mixture.mutant(
    "You look only at the deadlines. Then a part with a large weight may run ahead of its share. First "
    "leave out the parts whose next row may not come yet."
)
def never_too_early(weights, i):
    return by_table(weights, i, may=lambda taken, w, n: taken < w)


@mixture.mutant(
    "You take the part that is furthest behind its share. That is a fair rule, but another one, and with "
    "many parts it can miss a share by a row. Take the row with the earliest deadline."
)
def furthest_behind(weights, i):
    W = sum(weights)
    rounds, place = divmod(i, W)
    taken, part = [0] * len(weights), 0
    for n in range(place + 1):
        part = max(range(len(weights)), key=lambda p: ((n + 1) * weights[p] - taken[p] * W, -p))
        taken[part] += 1
    return part, rounds * weights[part] + taken[part] - 1


@mixture.mutant(
    "You round the parts' shares one after the other, each of what the part before it left, as Grain's "
    "mix does. With two parts that is within a row; with many the roundings add up."
)
def rounded_in_turn(weights, i):
    left, now, after = sum(weights), i, i + 1
    for part, w in enumerate(weights):
        next_now, next_after = now * (left - w) // left, after * (left - w) // left
        if now - next_now != after - next_after:
            return part, after - next_after - 1
        left, now, after = left - w, next_now, next_after
    raise AssertionError


@mixture.mutant(
    "If several parts have the same deadline, you take the last one. Take the one with the lowest "
    "number."
)
def last_of_a_tie(weights, i):
    return by_table(weights, i, tie=-1)


@mixture.mutant(
    "You round the deadline down. Row j of part p has until (j + 1) W / w rounded *up*."
)
def due_rounded_down(weights, i):
    W = sum(weights)
    return by_table(weights, i, due=lambda taken, w: (taken + 1) * W // w)


@mixture.mutant(
    "You let a row come one slot late: from slot j W / w rounded up on. It may come from the slot that is "
    "rounded *down*."
)
def may_rounded_up(weights, i):
    W = sum(weights)
    rounds, place = divmod(i, W)
    taken, part = [0] * len(weights), 0
    for n in range(place + 1):
        able = [p for p, w in enumerate(weights) if -(-taken[p] * W // w) <= n and taken[p] < w]
        able = able or [p for p, w in enumerate(weights) if taken[p] < w]
        part = min(able, key=lambda p: (-(-(taken[p] + 1) * W // weights[p]), p))
        taken[part] += 1
    return part, rounds * weights[part] + taken[part] - 1


@mixture.mutant(
    "Your row numbers start from 0 in each round. In round r a part has already given r times its weight."
)
def rows_of_the_round(weights, i):
    return by_table(weights, i % sum(weights))


@mixture.mutant(
    "Your rows are one too high. A part's first row is row 0, so its number is how many rows that part "
    "has given *before*."
)
def rows_from_one(weights, i):
    part, row = by_table(weights, i)
    return part, row + 1


@mixture.mutant(
    "You return the number of the row in the mixture. The question is the row of the *part*: how many "
    "rows that part has given before."
)
def row_of_the_whole(weights, i):
    return by_table(weights, i)[0], i


@mixture.mutant(
    "Far into the data your numbers are rounded: somewhere you compute in floating point. Use divmod and "
    "// on Python ints."
)
def in_floats(weights, i):
    W = sum(weights)
    part, row = by_table(weights, i % W)
    return part, int(float(i // W) * weights[part] + row)


class Remembering:
    """The next row of a mixture, whichever is asked for."""

    __name__ = "remembers"

    def __init__(self):
        self.count = 0

    def __call__(self, weights, i):
        if i == 0:
            self.count = 0
        self.count += 1
        return by_table(weights, self.count - 1)


mixture.mutant(
    "You count calls, or keep something else from one call to the next. The answer must depend on "
    "`weights` and `i` alone."
)(Remembering())


@mixture.mutant(
    "You go through the parts in turn, i modulo their number, so all get equal shares. The weights decide "
    "who gets a slot."
)
def equal_turns(weights, i):
    return i % len(weights), i // len(weights)


@mixture.mutant(
    "Rows are missing in your parts: you look up who gets the *next* slot. Row i of the mixture is what slot "
    "i holds."
)
def next_slot(weights, i):
    return by_table(weights, i + 1)


@mixture.mutant("You return the row first. The part comes first, then its row.")
def row_first(weights, i):
    return by_table(weights, i)[::-1]


@mixture.mutant("You return NumPy integers, or floats. Both are asked for as Python ints.")
def numpy_integers(weights, i):
    return tuple(np.int64(x) for x in by_table(weights, i))


@mixture.mutant("You look for the latest deadline. The earliest gets the slot.")
def latest_deadline(weights, i):
    return by_table(weights, i, due=lambda taken, w: (taken + 1) * sum(weights) // w * -1)


@mixture.mutant(
    "You give the slot to the part with the largest weight among those that may come. It is the earliest "
    "deadline that decides."
)
def heaviest_first(weights, i):
    return by_table(weights, i, due=lambda taken, w: -w)


@mixture.mutant(
    "Your deadline is the slot from which the row may come. It has time until ceil((j + 1) W / w)."
)
def due_when_it_may_come(weights, i):
    return by_table(weights, i, due=lambda taken, w: taken * sum(weights) // w)
