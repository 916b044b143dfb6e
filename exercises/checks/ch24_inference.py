import copy
import hashlib
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from minitext.book.grading import Exercise


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ----------------------------------------------------------------------------------- roofline

roofline = Exercise(
    "24.roofline",
    title="When decode stops waiting for memory",
    function="decode_roofline",
    minutes=15,
    points=10,
    statement="""
Write `decode_roofline(params, token_bytes, context, texts, flops, bandwidth)` for a step that computes one token of
each of `texts` texts.

- The chip reads all parameters once, 2 bytes each, and the cache of each text: `context` tokens of `token_bytes` each.
- It computes 2 FLOPs for each parameter and text. Attention's own arithmetic is left out.
- Reading and computing overlap completely, so the longer of the two is the step's time. If they take equally long, the
  step is bound by compute.
- `ridge` is the smallest number of texts, each with `context` tokens, for which computing takes at least as long as
  reading. A longer context moves it, and beyond some length there is none.
""",
    hints=(
        "Write both times as a line in the number of texts: a constant, and a slope. Which of the two has no "
        "constant?",
        "Computing catches up only if its line is the steeper one. Each text adds 2 * params / flops seconds of "
        "computing, and context * token_bytes / bandwidth seconds of reading.",
        "`gain = 2 * params / flops - context * token_bytes / bandwidth`; without a positive gain the ridge is "
        "`math.inf`, otherwise `math.ceil(2 * params / bandwidth / gain)`.",
    ),
)


def rates(t):
    params = int(t.rng.integers(5, 90)) * 10**9
    flops, bandwidth = float(t.rng.uniform(1, 9)) * 1e14, float(t.rng.uniform(4, 40)) * 1e11
    return params, int(t.rng.integers(20, 400)) * 1024, flops, bandwidth


def roofline_with(
    *, cache=True, each=True, overlap=True, never=True, rounds=math.ceil, moved=True, weight=2, work=2,
    weights_each=False, context_once=False, tie="compute", bound_by_weights=False,
):  # fmt: skip
    def fn(params, token_bytes, context, texts, flops, bandwidth):
        compute = work * params * texts / flops
        context = 1 if context_once else context
        tokens = (texts if each else 1) * context * token_bytes if cache else 0
        memory = (weight * params * (texts if weights_each else 1) + tokens) / bandwidth
        bound = tie if compute == memory else "compute" if compute > memory else "memory"
        if bound_by_weights:
            bound = "compute" if texts * bandwidth >= flops else "memory"
        slope = context * token_bytes / bandwidth if cache and each and moved else 0
        gain = work * params / flops - slope
        gain = gain if never else abs(gain)
        ridge = rounds(weight * params / bandwidth / gain) if gain > 0 else math.inf
        return max(compute, memory) if overlap else compute + memory, bound, ridge

    return fn


def rooflines_agree(fn, t, args, why):
    seconds, bound, ridge = roofline_with()(*args)
    got = fn(*args)
    params, token_bytes, context, texts, flops, bandwidth = args
    read, computed = 2 * params + texts * context * token_bytes, 2 * params * texts
    told = f"{read:,} bytes in {read / bandwidth:.6g} s, and {computed:,} FLOPs in {computed / flops:.6g} s"
    weights, cache = 2 * params / bandwidth, context * token_bytes / bandwidth
    wrong = {
        "Each text has a cache of its own; you read one": max(weights + cache, computed / flops),
        "A token takes 2 FLOPs a parameter; 6 is for training": max(
            read / bandwidth, 3 * computed / flops
        ),
        "A token takes 2 FLOPs a parameter, a multiplication and an addition; you count 1": max(
            read / bandwidth, computed / flops / 2
        ),
        "A parameter has 2 bytes; you read 1": max((read - params) / bandwidth, computed / flops),
        "A parameter has 2 bytes; you read 4": max(
            (read + 2 * params) / bandwidth, computed / flops
        ),
        "You read the weights alone, without the caches": max(weights, computed / flops),
        "You take the shorter of the two": min(read / bandwidth, computed / flops),
        "A step computes one token of each text; you compute those of its context again": max(
            read / bandwidth, context * computed / flops
        ),
    }
    t.close(got[0], seconds, 1e-9, 0, f"seconds, {why}: {told}", mistakes=wrong)
    wrong = {}
    if texts * bandwidth >= flops and bound == "memory":
        wrong = {
            "With the weights alone it would be compute, but the caches are read as well": "compute"
        }
    t.equal(got[1], bound, why=f"what bounds it, {why}: {told}", mistakes=wrong)
    more = context * token_bytes / bandwidth, 2 * params / flops
    told = f"another text adds {more[0]:.3g} s of reading and {more[1]:.3g} s of computing"
    gain = more[1] - more[0]
    wrong = {}
    if gain < 0:
        told += "; computing never catches up, however many texts there are"
        wrong = {"You divide by a difference that is negative": math.ceil(weights / gain)}
    if gain > 0:
        exact = weights / gain
        wrong = {
            "It is a whole number of texts: round up": exact,
            "You round down: with that many, reading still takes longer": math.floor(exact),
            "You go on to the next number. With as many, both take equally long, and that is enough": ridge
            + 1,
            "A token takes 2 FLOPs a parameter; 6 is for training": math.ceil(
                weights / (3 * more[1] - more[0])
            ),
            "Your ridge leaves out the caches of the texts that it adds": math.ceil(
                weights / more[1]
            ),
            "You add the two; another text's reading is subtracted from its computing": math.ceil(
                weights / (more[0] + more[1])
            ),
        }
    t.equal(got[2], ridge, why=f"the ridge, {why}: {told}", mistakes=wrong)


@roofline.check("with a short context")
def _(fn, t):
    for texts in (1, 37, 100_000):
        params, token, flops, bandwidth = rates(t)
        # A quarter of the context at which the ridge is gone.
        context = int(2 * params / flops * bandwidth / token / 4)
        rooflines_agree(
            fn,
            t,
            (params, token, context, texts, flops, bandwidth),
            f"{texts} texts, {context} tokens",
        )
    # A context that halves the gain: the ridge is twice that of the weights, and these texts are between the two.
    params, token, flops, bandwidth = rates(t)
    context = int(params / flops * bandwidth / token)
    texts = int(1.5 * flops / bandwidth)
    rooflines_agree(
        fn,
        t,
        (params, token, context, texts, flops, bandwidth),
        f"{texts} texts, {context} tokens",
    )


@roofline.check("without a context")
def _(fn, t):
    params, token, flops, bandwidth = rates(t)
    for texts in (1, 10_000):
        rooflines_agree(
            fn, t, (params, token, 0, texts, flops, bandwidth), f"{texts} texts and no context"
        )


@roofline.check("with a context so long that memory always bounds")
def _(fn, t):
    params, token, flops, bandwidth = rates(t)
    context = int(2 * params / flops * bandwidth / token * 3) + 1
    for texts in (64, 10**6):
        rooflines_agree(
            fn,
            t,
            (params, token, context, texts, flops, bandwidth),
            f"{texts} texts, {context} tokens",
        )


@roofline.check("a tie")
def _(fn, t):
    rooflines_agree(
        fn, t, (1000, 3, 0, 8, 4096.0, 512.0), "1,000 parameters, 8 FLOPs a byte, 8 texts"
    )


for name, hint, options in (
    ("no_cache", "You read the weights alone. Each text also reads its own cache: context * token_bytes.",
     {"cache": False}),
    ("one_cache", "You count one text's cache. Weights are shared by all texts, and each cache belongs to one text.",
     {"each": False}),
    ("summed", "You add the two times. They overlap, so the longer one counts.", {"overlap": False}),
    ("always_a_ridge", "If each text adds more reading than computing, no number of texts is enough: return math.inf.",
     {"never": False}),
    ("rounded_down", "You round down. At that number of texts memory is still the slower side.",
     {"rounds": math.floor}),
    ("ridge_of_weights", "Your ridge leaves the caches out: texts that it adds bring their caches with them.",
     {"moved": False}),
    ("one_byte", "A parameter takes 2 bytes here.", {"weight": 1}),
    ("one_flop", "You count one FLOP for each parameter and text. A multiplication and an addition are two.",
     {"work": 1}),
    ("weights_of_each_text", "You read the weights once for each text. The step reads them once, for all.",
     {"weights_each": True}),
    ("one_token_of_context", "Each text's cache has `context` tokens. You read one.", {"context_once": True}),
    ("bound_by_weights", "You compare the number of texts with FLOP/s over bytes/s. That's the ridge without caches: "
     "compare the two times.", {"bound_by_weights": True}),
    ("a_tie_is_memory", "If both take equally long, the step is bound by compute.", {"tie": "memory"}),
):  # fmt: skip
    mistaken(roofline, name, hint, roofline_with(**options))


# ----------------------------------------------------------------------------- page_allocator

page_allocator = Exercise(
    "24.page_allocator",
    title="Pages, tables, and a copy on the first write",
    function="Allocator",
    minutes=30,
    points=15,
    statement="""
Write the class `Allocator`, which keeps the books for a cache made of pages. It never touches the cache itself.

- `append(text)` makes room for a text's next token and returns (page, slot, copy_of): token number n goes into slot
  n % page_tokens of the text's page number n // page_tokens. A text takes a page when it needs it, not before.
- `fork(text, new)` starts a new text as a copy of an old one. It takes no page: the two share all pages of the old one.
- Writing into a page that another text has too would change that text. So an `append` that would write into a shared
  page puts a new page in the table instead, and `copy_of` names the old one. Once a text is alone with a page, it
  writes in place. Full pages are never written again and stay shared.
- `free(text)` gives back the pages that no other text has.
- If no page is free, `append` raises `MemoryError` and changes nothing: the same call succeeds once a page is free.
- `table(text)` returns a list of the text's pages. Changing the list changes nothing.
""",
    hints=(
        "When is a page free again? For each page, keep the number of texts that have it.",
        "In `append`, look at the slot. If it is 0, a new page is needed, even if no other text has the last one. "
        "If it isn't, the number of holders of the last page decides.",
        "Take the page first: if that raises, nothing has changed yet. Then put it into the table, and lower the "
        "count of the page that it replaces.",
    ),
)  # fmt: skip


class Books:
    """The solution, with a mistake that is asked for."""

    copies, counts = True, True
    hasty = early = greedy = always = forgets = leaks = shares = aliases = unguarded = frees_all = (
        False
    )

    def __init__(self, pages, page_tokens):
        self.page_tokens, self.holders = page_tokens, [0] * pages
        self.free_pages = list(range(pages))
        self.tables, self.lengths = {}, {}

    def append(self, text):
        table, length = self.tables.get(text, []), self.lengths.get(text, 0)
        number, slot = divmod(length, self.page_tokens)
        if self.early:
            self.lengths[text] = length + 1
            self.tables.setdefault(text, table)
        copy_of = None
        if slot == 0 and number == len(table):
            table = [*table, self.take()]
        elif slot and self.copies and self.holders[table[number]] > 1:
            copy_of = table[number]
            self.holders[copy_of] -= self.hasty
            page = self.take()
            if self.aliases:
                table[number] = page
            else:
                table = [*table[:number], page]
            if not self.leaks and not self.hasty:
                self.holders[copy_of] -= 1
        elif (
            self.always
            and slot
            and self.holders[table[number]] == 1
            and text in getattr(self, "forked", ())
        ):
            copy_of = table[number]
            table = [*table[:number], self.take()]
            self.holders[copy_of] -= 1
            self.free_pages.append(copy_of)
            self.forked.discard(text)
        if self.greedy and slot + 1 == self.page_tokens:
            table = [*table, self.take()]
        self.tables[text], self.lengths[text] = table, length + 1
        return table[number], slot, None if self.forgets else copy_of

    def fork(self, text, new):
        one = self.shares or self.aliases
        self.tables[new] = self.tables[text] if one else list(self.tables[text])
        self.lengths[new] = self.lengths[text]
        self.forked = {*getattr(self, "forked", ()), text, new}
        for page in self.tables[new] if self.counts else ():
            self.holders[page] += 1

    def free(self, text):
        del self.lengths[text]
        for page in self.tables.pop(text):
            self.holders[page] -= 1
            if self.holders[page] <= 0 or self.frees_all:
                self.free_pages.append(page)

    def table(self, text):
        return self.tables[text] if self.shares else list(self.tables[text])

    def take(self):
        if not self.free_pages and not self.unguarded:
            raise MemoryError
        page = self.free_pages.pop()
        self.holders[page] = 1
        return page


def drawn_text(t):
    return ("text", int(t.rng.integers(10**6)))


def used(allocator, texts):
    return {page for text in texts for page in allocator.table(text)}


@page_allocator.check("one text")
def _(fn, t):
    S = int(t.rng.integers(3, 6))
    allocator, text = fn(7, S), drawn_text(t)
    for n in range(2 * S + 1):
        page, slot, copy_of = allocator.append(text)
        table = list(allocator.table(text))
        told = f"(slot, copy_of) of token {n} with {S} tokens in a page: "
        told += (
            "no other text has this page, so nothing is copied"
            if slot == n % S
            else "token n goes into slot n % page_tokens"
        )
        t.equal((slot, copy_of), (n % S, None), why=told)
        told = f"pages of a text with {n + 1} tokens, {S} in a page"
        early = {"A page is taken before there is a token for it": n // S + 2}
        t.equal(len(table), n // S + 1, why=told, mistakes=early)
        t.equal(page, table[-1], why=f"page of token {n}, against the table's last")
    t.equal(len(set(table)), 3, why="different pages of a text of three")
    t.true(
        all(type(p) is int and 0 <= p < 7 for p in table), "pages are numbers from 0 to 6", table
    )


@page_allocator.check("out of pages, and again")
def _(fn, t):
    allocator, (a, b) = fn(2, 2), (drawn_text(t), "b")
    for text in (a, a, b):
        allocator.append(text)
    for text in (a, drawn_text(t)):
        for why in (
            "no page is free",
            "still no page is free; the call that failed has changed nothing",
        ):
            t.raises(MemoryError, allocator.append, text, why=why)
    t.equal(len(allocator.table(a)), 1, why="pages of the text that got none")
    allocator.append(b)
    allocator.free(b)
    try:
        page, slot, copy_of = allocator.append(a)
    except MemoryError as error:
        error.add_note("want a page: the other text has ended, so its page is free")
        raise
    t.equal((slot, copy_of), (0, None), why="the same append after another text has ended")
    t.equal(len({page, *allocator.table(a)}), 2, why="pages of the text then")


@page_allocator.check("a fork")
def _(fn, t):
    allocator, S = fn(6, 4), 4
    for _ in range(S + 2):
        allocator.append("a")
    before = list(allocator.table("a"))
    allocator.fork("a", "b")
    t.equal(
        list(allocator.table("b")),
        before,
        why="table of the new text: a fork takes no page, they share all",
    )
    page, slot, copy_of = allocator.append("b")
    told = (
        "(slot, copy_of) of the new text's first token: copy_of is the shared page that it replaces"
    )
    empty = {"The new text begins empty here: a fork has all tokens of the old one": (0, None)}
    t.equal((slot, copy_of), (2, before[1]), why=told, mistakes=empty)
    t.true(page not in before, "the new text writes into a page that the old one has", page)
    t.equal(list(allocator.table("b")), [before[0], page], why="the new text's table then")
    t.equal(
        list(allocator.table("a")),
        before,
        why="the old text's table, after the new one has another page",
    )
    t.equal(
        allocator.append("a"), (before[1], 2, None), why="the old text, alone with its page again"
    )


@page_allocator.check("a fork, and no page is free")
def _(fn, t):
    allocator = fn(1, 4)
    allocator.append("a")
    allocator.fork("a", "b")
    t.raises(
        MemoryError, allocator.append, "b", why="'b' needs a page of its own, and none is free"
    )
    why = (
        "the page is still shared by 'a' and 'b': the append of 'b' that failed has changed nothing"
    )
    t.raises(MemoryError, allocator.append, "a", why=why)
    allocator.free("b")
    t.equal(
        allocator.append("a"),
        (allocator.table("a")[0], 1, None),
        why="'a' after 'b' has ended, alone with its page",
    )


@page_allocator.check("a name that is used again")
def _(fn, t):
    allocator, text = fn(4, 4), drawn_text(t)
    for _ in range(6):
        allocator.append(text)
    allocator.free(text)
    try:
        page, slot, copy_of = allocator.append(text)
    except LookupError as error:
        error.add_note(
            "want a new, empty text: nothing is left of the one with this name that has ended"
        )
        raise
    told = "(slot, copy_of) of the first token of a new text, with the name of one that has ended"
    t.equal((slot, copy_of), (0, None), why=told)
    t.equal(allocator.table(text), [page], why="its pages")


@page_allocator.check("a fork of whole pages")
def _(fn, t):
    allocator = fn(3, 2)
    for _ in range(2):
        allocator.append("a")
    allocator.fork("a", "b")
    page, slot, copy_of = allocator.append("b")
    t.equal(
        (slot, copy_of), (0, None), why="the first token after a full page is in no shared page"
    )
    t.equal(len(allocator.table("a")), 1, why="pages of the old text, after the new one took one")
    other = allocator.append("a")
    t.equal(
        len({page, other[0], *allocator.table("a")[:1]}), 3, why="pages that the two texts hold"
    )


@page_allocator.check("a shared page outlives each of its texts")
def _(fn, t):
    for first, second in (("a", "b"), ("b", "a")):
        allocator = fn(2, 4)
        allocator.append("a")
        allocator.fork("a", "b")
        allocator.free(first)
        kept = allocator.table(second)[0]
        page, _, _ = allocator.append("c")
        t.true(
            page != kept,
            f"a page of text {second!r} was given to another text after {first!r} ended",
            page,
        )
        t.equal(
            allocator.append(second), (kept, 1, None), why=f"text {second!r}, alone with its page"
        )
        told = f"of two pages {second!r} and 'c' have one each: {first!r} hasn't given back what {second!r} still has"
        t.raises(MemoryError, allocator.append, "d", why=told)


def history(fn, t, steps):
    """What texts write, they must read: pages of tokens, copied as the answer says."""
    P, S = int(t.rng.integers(6, 12)), int(t.rng.integers(2, 5))
    allocator, memory, texts, name = fn(P, S), {}, {}, 0
    for step in range(steps):
        act = t.rng.random()
        if texts and act < 0.15:
            name += 1
            old = list(texts)[int(t.rng.integers(len(texts)))]
            allocator.fork(old, name)
            texts[name] = list(texts[old])
        elif texts and act < 0.3:
            old = list(texts)[int(t.rng.integers(len(texts)))]
            allocator.free(old)
            del texts[old]
        else:
            if not texts or act < 0.4:
                name += 1
                key = name
            else:
                key = list(texts)[int(t.rng.integers(len(texts)))]
            held = len(used(allocator, texts))
            try:
                page, slot, copy_of = allocator.append(key)
            except MemoryError:
                t.equal(held, P, why=f"pages in use, of {P}, when MemoryError was raised")
                old = next(iter(texts))
                allocator.free(old)
                del texts[old]
                continue
            if copy_of is not None:
                for s in range(S):
                    memory[page, s] = memory.get((copy_of, s))
            memory[page, slot] = step
            texts.setdefault(key, []).append(step)
        for key, tokens in texts.items():
            table = allocator.table(key)
            found = [memory.get((table[n // S], n % S)) for n in range(len(tokens))]
            t.equal(
                found, tokens, why=f"tokens that a text finds in its pages after {step + 1} calls"
            )
    for key in texts:
        allocator.free(key)
    for n in range(P * S):
        allocator.append(("last", n // (P * S)))


@page_allocator.check("what texts write, they read")
def _(fn, t):
    for _ in range(4):
        history(fn, t, 60)


@page_allocator.check("a table is a list of the caller's own")
def _(fn, t):
    allocator = fn(3, 2)
    allocator.append("a")
    allocator.table("a").append(2)
    t.equal(
        len(allocator.table("a")), 1, why="pages of a text whose list was changed by its reader"
    )


for name, hint, changes in (
    ("writes_in_shared", "You write into a page that another text has too. Look at its holders before you give a slot "
     "of it away, and take a page of its own.", {"copies": False}),
    ("counts_nothing", "`fork` hands pages to a second text without counting it as a holder.", {"counts": False}),
    ("changes_before_failing", "When no page is free the text has grown already. Take the page first, then write down "
     "what changed.", {"early": True}),
    ("let_go_too_early", "You lower the count of the shared page before there is a new one. If none is free, the "
     "page counts as one text's own, and that text writes into it. Take the new page first.", {"hasty": True}),
    ("one_page_early", "You take a page as soon as the last one is full. A text that ends there never needed it.",
     {"greedy": True}),
    ("unguarded", "You take a page from an empty list, which raises an IndexError. Raise MemoryError.",
     {"unguarded": True}),
    ("one_table_for_both", "After a fork both texts have the same list, so a new page of one is in the other's table. "
     "Copy the list.", {"aliases": True}),
    ("frees_shared", "You give back pages that another text still has.", {"frees_all": True}),
    ("copies_alone", "You copy although the other text is gone or has its own page. Alone with a page, a text writes "
     "in place: it is the number of holders that decides, not the fork.", {"always": True}),
    ("copies_without_saying", "`copy_of` must name the page whose tokens belong in the new one, or they are lost.",
     {"forgets": True}),
    ("page_lost", "After a copy the text no longer has the old page. Count one holder less, or it is never free "
     "again.",
     {"leaks": True}),
    ("one_list", "You hand out the list in which you keep the books, so others change it. Copy it.", {"shares": True}),
):  # fmt: skip
    mutant = type(name, (Books,), changes)
    page_allocator.mutant(hint)(mutant)


# ---------------------------------------------------------------------------- paged_attention

paged_attention = Exercise(
    "24.paged_attention",
    title="Attention through a table",
    function="attend_pages",
    minutes=25,
    points=15,
    statement="""
Write `attend_pages(q_BNH, k_PSKH, v_PSKH, table_BX, lengths_B)`: for each of B texts, one query of N heads attends to
the text's own keys, which are scattered over pages.

- Token n of text b is in slot n % S of page `table_BX[b, n // S]`. Only tokens before `lengths_B[b]` exist. After a
  text's last page in use, the table's entries are arbitrary, but always valid page numbers.
- Unused slots and pages hold leftovers of other texts, perhaps NaN or infinite. None of that may affect the result.
- Scores are divided by the square root of H. They may be as large as 10,000.
- A text of length 0 gets zeros.
- One trace under `jax.jit` serves all tables and lengths, and no Python loop goes through texts or pages.
""",
    hints=(
        "`k_PSKH[table_BX]` has the shape [B, X, S, K, H]. Which two dimensions become one, of L = X * S tokens?",
        "A weight of 0 does not help against a value that is NaN: 0 * NaN is NaN. What has to be replaced before the "
        "second product?",
        "With `seen_BL = jnp.arange(L) < lengths_B[:, None]`: put -1e30 into unseen scores, take "
        "`jax.nn.softmax`, set "
        "unseen weights to 0 (a text of length 0 has only these), and unseen *values* to 0.",
    ),
)  # fmt: skip


def attention_by_hand(q, k, v, table, lengths, real=None, score=None):
    """Text by text, head by head, in float64; slots from `real` on have the given score, if any."""
    (B, N, H), (_, S, K, _) = q.shape, k.shape
    out = np.zeros((B, N, H))
    for b in range(B):
        n = np.arange(lengths[b])
        pages, slots = table[b, n // S], n % S
        for head in range(N if len(n) else 0):
            keys, values = (x[pages, slots, head // (N // K)].astype(np.float64) for x in (k, v))
            scores = keys @ q[b, head].astype(np.float64) / math.sqrt(H)
            if score is not None:
                scores[real[b] :] = score
            weights = np.exp(scores - scores.max())
            out[b, head] = weights / weights.sum() @ values
    return out


def texts_in_pages(t, lengths, N=4, K=2, H=8, S=4, X=3, scale=1.0, poison=np.nan):
    B = len(lengths)
    P = B * X + 2
    table = t.rng.permutation(P)[: B * X].reshape(B, X).astype(np.int32)
    q = (scale * t.rng.normal(size=(B, N, H))).astype(np.float32)
    k, v = (t.rng.normal(size=(P, S, K, H)).astype(np.float32) for _ in range(2))
    real = np.zeros((P, S), bool)
    for b, length in enumerate(lengths):
        n = np.arange(length)
        real[table[b, n // S], n % S] = True
    for x in (k, v):
        x[~real] = poison
    return q, k, v, table, np.asarray(lengths, np.int32)


def attends(fn, t, why, *args):
    want = attention_by_hand(*args)
    got = jax.jit(fn)(*map(jnp.asarray, args))
    q, k, v, table, lengths = args
    N, H = q.shape[1:]
    mistakes = {
        f"Scores are divided by {text}, not by the root of H": attention_by_hand(
            (q * (math.sqrt(H) / by)).astype(np.float32), k, v, table, lengths
        )
        for text, by in {
            "nothing": 1.0,
            "H": H,
            "the root of N": math.sqrt(N),
            "the root of N * H": math.sqrt(N * H),
        }.items()
        if not math.isclose(by, math.sqrt(H))
    }
    told = np.asarray(got, np.float64)
    if told.shape == want.shape:
        S, longest = k.shape[1], table.shape[1] * k.shape[1]
        if np.isfinite(told).all():
            with np.errstate(all="ignore"):
                seen = "Slots beyond a text's length have a weight: their scores are 0 there, or not masked"
                full = np.full_like(lengths, longest)
                mistakes[seen] = attention_by_hand(q, k, v, table, full, lengths, 0.0)
                whole = -(-lengths // S) * S
                seen = "All slots of a text's pages are seen: the last one may not be full"
                mistakes[seen] = attention_by_hand(q, k, v, table, whole)
            seen = "Every weight is 1: the softmax is over another dimension than the tokens"
            mistakes[seen] = np.stack(
                [
                    np.repeat(
                        v[pages].reshape(longest, *v.shape[2:])[:length].sum(0), N // v.shape[2], 0
                    )
                    for pages, length in zip(table, lengths, strict=True)
                ]
            )
        empty = np.asarray(lengths) == 0
        if empty.any() and np.isnan(told[empty]).any():
            why += ". A softmax of nothing but -inf is 0 / 0: for a text of length 0 there is nothing to divide"
        elif np.isnan(told).any() and not np.isfinite(k).all() and np.abs(q).max() < 100:
            why += ". 0 times NaN is NaN, and NaN plus -1e30 too: `jnp.where` removes an unused slot's score and value"
    t.close(got, want, 1e-4, 1e-5, why, np.float32, mistakes)


@paged_attention.check("one text in one page")
def _(fn, t):
    attends(fn, t, "4 tokens, one page of 4", *texts_in_pages(t, [4], N=1, K=1, X=1))


@paged_attention.check("several texts of full pages, in any order")
def _(fn, t):
    attends(fn, t, "heads share nothing", *texts_in_pages(t, [12, 12], N=3, K=3, poison=0))


@paged_attention.check("heads that share keys")
def _(fn, t):
    attends(fn, t, "6 heads, 2 key heads", *texts_in_pages(t, [8, 12, 4], N=6, K=2, poison=0))


@paged_attention.check("texts of different lengths")
def _(fn, t):
    lengths = t.rng.integers(1, 13, 5).tolist()
    attends(fn, t, f"lengths {lengths}", *texts_in_pages(t, [*lengths, 1], poison=3.0))


@paged_attention.check("leftovers that are no numbers")
def _(fn, t):
    for poison in (np.nan, np.inf):
        lengths = t.rng.integers(1, 12, 4).tolist()
        attends(
            fn,
            t,
            f"unused slots hold {poison}",
            *texts_in_pages(t, lengths, H=6, S=3, X=4, poison=poison),
        )


@paged_attention.check("large scores")
def _(fn, t):
    attends(fn, t, "scores of thousands", *texts_in_pages(t, [5, 11], scale=3000.0))
    q, k, v, table, lengths = texts_in_pages(t, [5, 11])
    low = -1e4 * math.sqrt(q.shape[2]) / q.shape[2]  # every score is -10,000
    q, k = np.full_like(q, 1.0), np.full_like(k, low)
    attends(fn, t, "all scores are -10,000", q, k, v, table, lengths)


@paged_attention.check("a text without tokens")
def _(fn, t):
    attends(fn, t, "lengths 0 and 5", *texts_in_pages(t, [0, 5]))


@paged_attention.check("one trace, and no loop of Python")
def _(fn, t):
    traces = t.traces(fn)
    for _ in range(3):
        args = texts_in_pages(t, t.rng.integers(0, 13, 3).tolist())
        traces(*map(jnp.asarray, args))
    t.equal(traces.count, 1, why="traces for three tables")

    def size(B, X):
        args = texts_in_pages(t, [1] * B, X=X)
        return len(jax.make_jaxpr(fn)(*map(jnp.asarray, args)).jaxpr.eqns)

    few, many = size(2, 2), size(6, 7)
    t.true(
        many <= few + 8,
        f"{few} operations for 2 texts and {many} for 6: a Python loop goes through them",
        "loop",
    )


def attention_with(
    *, values=True, mask=True, scale=True, shared="//", zeros=True, stable=True, order=True, more=0, low=-1e30,
):  # fmt: skip
    def fn(q, k_pages, v_pages, table, lengths):
        (B, N, H), (_, S, K, _) = q.shape, k_pages.shape
        L = table.shape[1] * S
        k, v = (x[table] for x in (k_pages, v_pages))
        if not order:
            k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        k, v = (x.reshape(B, L, K, H) for x in (k, v))
        k, v = (
            jnp.repeat(x, N // K, axis=2) if shared == "//" else jnp.tile(x, (1, 1, N // K, 1))
            for x in (k, v)
        )
        seen = jnp.arange(L) < lengths[:, None] + more
        scores = jnp.einsum("bnh,blnh->bnl", q, k) / (math.sqrt(H) if scale else 1)
        if mask:
            scores = jnp.where(seen[:, None], scores, low)
        top = jnp.max(scores, axis=-1, keepdims=True) if stable else 0
        weights = jnp.exp(scores - top)
        weights = weights / weights.sum(-1, keepdims=True)
        if zeros:
            weights = jnp.where(seen[:, None], weights, 0) if mask else weights
        if values:
            v = jnp.where(seen[:, :, None, None], v, 0)
        return jnp.einsum("bnl,blnh->bnh", weights, v)

    return fn


def averages_nothing(q, k_pages, v_pages, table, lengths):
    """A text of length 0 gets the average of what is there."""
    out = attention_with(values=False, zeros=False)(
        q, jnp.nan_to_num(k_pages), jnp.nan_to_num(v_pages), table, lengths
    )
    seen = jnp.arange(table.shape[1] * k_pages.shape[1]) < lengths[:, None]
    right = attention_with()(q, k_pages, v_pages, table, lengths)
    return jnp.where(jnp.any(seen, 1)[:, None, None], right, jnp.where(out == 0, 1.0, out))


for name, hint, fn in (
    ("masks_scores_alone", "The scores of unused slots are masked, and their values still enter the second product: 0 "
     "times NaN is NaN. Set unseen values to 0.", attention_with(values=False)),
    ("masks_nothing", "You attend to all slots of all pages. Tokens from `lengths_B[b]` on don't exist.",
     attention_with(mask=False)),
    ("one_slot_too_many", "You see one slot more than the text has tokens. Slot `lengths_B[b]` is unused.",
     attention_with(more=1)),
    ("one_slot_too_few", "You see one slot fewer than the text has tokens.", attention_with(more=-1)),
    ("masked_with_too_little", "Your masked scores are low, but real ones may be lower: they reach -10,000.",
     attention_with(low=-1e4, zeros=False)),
    ("no_scale", "Divide the scores by the square root of H.", attention_with(scale=False)),
    ("heads_in_turn", "Query head n uses key head n // (N // K): neighbours share one. You let them take turns.",
     attention_with(shared="%")),
    ("unstable", "exp of a score of thousands is infinite. Subtract the maximum first, or use jax.nn.softmax.",
     attention_with(stable=False)),
    ("pages_interleaved", "You joined slots and pages in the wrong order. Token n is in slot n % S of page n // S, so "
     "all slots of the first page come first.", attention_with(order=False)),
    ("nothing_by_nothing", "You mask with -inf, and a text of length 0 has nothing else: its softmax is 0 / 0, "
     "which is NaN. Mask with -1e30, and set unseen weights to 0 after the softmax.",
     attention_with(low=-jnp.inf, zeros=False)),
    ("masked_with_zero", "Your masked scores are 0, and exp(0) is 1: unused slots get weight. Mask before the softmax "
     "with -1e30.", attention_with(low=0.0, zeros=False)),
    ("average_of_nothing", "If every score is masked, softmax gives each slot the same weight. A text of length 0 "
     "gets "
     "zeros: set unseen weights to 0 after the softmax.", averages_nothing),
):  # fmt: skip
    mistaken(paged_attention, name, hint, fn)


# -------------------------------------------------------------------------------- prefix_keys

prefix_keys = Exercise(
    "24.prefix_keys",
    title="Names for what a page holds",
    function="page_keys",
    minutes=20,
    points=10,
    forbid=("hashlib.md5", "hashlib.sha1"),
    statement="""
Two prompts that begin alike can share the pages of their common beginning. Write `page_keys(tokens, page_tokens)`,
which gives each full page of a prompt a key. An engine keeps a dictionary from keys to pages.

- Key number i of one prompt equals key number j of another only if i == j and the first (i + 1) * page_tokens tokens
  of both are the same. Keys and values of a page depend on all tokens before it, so its own tokens are not enough.
- Only full pages have a key. The last token of a prompt must be computed in any case, because the next one is drawn
  from its logits. So it is never in a page with a key, even if it fills that page.
- Keys are `bytes` of 16 to 32 bytes, however long the prompt. Finding two texts with the same key must be infeasible,
  even for someone who tries: use `hashlib.sha256`.
- The same prompt has the same keys in every process. 40,000 tokens take less than a second.
""",
    hints=(
        "Which tokens does key number i stand for? How can you make it from key number i - 1, so that you hash each "
        "token once?",
        "`hashlib.sha256(data).digest()` returns 32 bytes. Here the data is the key of the page before, followed by "
        "the page's tokens as bytes, in which each token has the same width.",
        "`last = hashlib.sha256(last + np.asarray(page, np.int64).tobytes()).digest()` for page number i from 0 to "
        "`(len(tokens) - 1) // page_tokens - 1`, beginning with `last = b''`.",
    ),
)  # fmt: skip


def right_keys(tokens, S):
    keys, last = [], b""
    for i in range((len(tokens) - 1) // S):
        last = hashlib.sha256(
            last + np.asarray(tokens[i * S : (i + 1) * S], np.int64).tobytes()
        ).digest()
        keys.append(last)
    return keys


def keys_of(fn, t, tokens, S):
    keys = fn(tokens, S)
    t.equal(
        len(keys),
        max(0, (len(tokens) - 1) // S),
        why=f"keys of {len(tokens)} tokens in pages of {S}",
    )
    for key in keys:
        t.true(
            type(key) is bytes and 16 <= len(key) <= 32,
            f"a key is {key!r:.60}, a {type(key).__name__} of length {len(key)}, and not 16 to 32 bytes",
            (type(key).__name__, len(key)),
        )
    return keys


def drawn_tokens(t, count, most=50_000):
    return [int(x) for x in t.rng.integers(0, most, count)]


def shared_pages(fn, t, a, b, S, why):
    ka, kb = keys_of(fn, t, a, S), keys_of(fn, t, b, S)
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    for i, x in enumerate(ka):
        for j, y in enumerate(kb):
            same = i == j and common >= (i + 1) * S
            t.equal(x == y, same, why=f"whether key {i} equals key {j} of the other prompt: {why}")


@prefix_keys.check("fewer tokens than a page")
def _(fn, t):
    for S in (4, int(t.rng.integers(5, 9))):
        keys_of(fn, t, drawn_tokens(t, 2), S)


@prefix_keys.check("how many pages have a key")
def _(fn, t):
    for S in (1, 4, int(t.rng.integers(5, 9))):
        for count in (1, S, S + 1, 2 * S, 2 * S + 1, 3 * S + S // 2):
            keys_of(fn, t, drawn_tokens(t, count), S)


@prefix_keys.check("prompts that begin alike")
def _(fn, t):
    S = int(t.rng.integers(2, 6))
    begin = drawn_tokens(t, 2 * S + 1)
    a, b = (begin + drawn_tokens(t, 2 * S) for _ in range(2))
    shared_pages(fn, t, a, b, S, f"{2 * S + 1} tokens in common, pages of {S}")
    shared_pages(fn, t, a, list(a), S, "the same prompt twice")


@prefix_keys.check("the same page after another beginning")
def _(fn, t):
    S = 4
    page = drawn_tokens(t, S)
    a, b = (drawn_tokens(t, S) + page + [1] for _ in range(2))
    shared_pages(fn, t, a, b, S, "the second page alone is the same")
    shared_pages(
        fn, t, page + page + [1], page + page + page + [1], S, "the same page again and again"
    )


@prefix_keys.check("the same tokens in another order")
def _(fn, t):
    S, tokens = 3, drawn_tokens(t, 7)
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    shared_pages(fn, t, tokens, swapped, S, "two tokens of the first page change places")
    shared_pages(fn, t, tokens, [*tokens[3:6], *tokens[:3], 1], S, "two pages change places")


@prefix_keys.check("tokens that read alike")
def _(fn, t):
    shared_pages(fn, t, [1, 23, 5, 6, 9], [12, 3, 5, 6, 9], 2, "1, 23 and 12, 3")
    shared_pages(fn, t, [0, 0, 0, 0, 1], [0, 0, 1, 0, 1], 2, "zeros")


def far_apart(fn, t, far):
    token = int(t.rng.integers(1, 99))
    shared_pages(fn, t, [token, 7, 1], [token + far, 7, 1], 2, f"tokens {token} and {token + far}")


@prefix_keys.check("tokens that share their last byte")
def _(fn, t):
    far_apart(fn, t, 256)


@prefix_keys.check("tokens that share their last bytes")
def _(fn, t):
    for far in (65536, 2**24, 2**31 - 256):
        far_apart(fn, t, far)


@prefix_keys.check("every byte of a key")
def _(fn, t):
    keys = np.array([list(key) for key in keys_of(fn, t, drawn_tokens(t, 1601), 4)])
    different = [len(np.unique(column)) for column in keys.T]
    dull = [n for n, count in enumerate(different) if count < 100]
    if dull:
        told = (
            f"byte {dull[0]} of 400 keys has {different[dull[0]]} different values, and {len(dull)} bytes have fewer "
            "than 100: this is no digest of SHA-256. Python's `hash`, for instance, fills only 8 bytes"
        )
    t.true(not dull, told if dull else "", different)


@prefix_keys.check("a long prompt")
def _(fn, t):
    tokens = drawn_tokens(t, 40_001)
    start = time.process_time()
    keys = keys_of(fn, t, tokens, 16)
    seconds = time.process_time() - start
    t.true(seconds < 1.0, f"{len(keys)} keys took {seconds:.1f} s", "slow")


def keys_with(
    *,
    chain=True,
    last=False,
    width=np.int64,
    text=False,
    whole=False,
    order=True,
    partial=False,
    form=lambda key: key.digest(),
):
    def fn(tokens, S):
        keys, before = [], b""
        end = len(tokens) if last else len(tokens) - 1
        pages = -(-end // S) if partial else end // S
        for i in range(pages):
            part = tokens[: (i + 1) * S] if whole else tokens[i * S : (i + 1) * S]
            part = part if order else sorted(part)
            data = (
                "".join(map(str, part)).encode()
                if text
                else np.asarray(part, np.int64).astype(width).tobytes()
            )
            key = hashlib.sha256((before if chain and not whole else b"") + data)
            before = key.digest()
            keys.append(form(key))
        return keys

    return fn


for name, hint, fn in (
    ("short_hash", "8 bytes, such as Python's `hash` has, are too few: two texts with the same key can be found. Take "
     "at least 16 of SHA-256.", keys_with(form=lambda key: key.digest()[:8])),
    ("digits_as_text", "Your keys are strings. A digest is bytes.", keys_with(form=lambda key: key.hexdigest())),
    ("digits_as_bytes", "Your keys are hexadecimal digits: 64 bytes. The digest itself has 32.",
     keys_with(form=lambda key: key.hexdigest().encode())),
    ("page_alone", "Your key forgets what came before the page. Its keys and values were computed with all earlier "
     "tokens in view: hash the last key along with the tokens.", keys_with(chain=False)),
    ("last_token_too", "The last token of a prompt must be computed, so it can't be in a page that is found.",
     keys_with(last=True)),
    ("part_of_a_page", "Only full pages have a key.", keys_with(partial=True)),
    ("bytes_too_narrow", "Tokens 1 and 257 become the same byte. Give each token at least four bytes.",
     keys_with(width=np.uint8)),
    ("two_bytes", "A vocabulary may have more than 65,536 tokens. Give each at least four bytes.",
     keys_with(width=np.uint16)),
    ("digits_joined", "Joined as text, 1 and 23 look like 12 and 3. Give each token the same width.",
     keys_with(text=True)),
    ("sorted_tokens", "Your key doesn't see the order of the tokens.", keys_with(order=False)),
    ("all_tokens_again", "You hash the whole beginning for every page, so a long prompt takes forever. Hash the "
     "last key instead of all the tokens before.", keys_with(whole=True)),
):  # fmt: skip
    mistaken(prefix_keys, name, hint, fn)


# ----------------------------------------------------------------------------------- schedule

schedule = Exercise(
    "24.schedule",
    title="What the next step computes",
    function="plan_step",
    minutes=40,
    points=25,
    statement="""
Write the scheduler: `plan_step(running, waiting, free_pages, page_tokens, budget, most)` decides which tokens the next
step computes, under a budget of tokens and of pages. Its rules, in this order:

1. **Decode first.** A running text that has all but one of its tokens in the cache computes that one. Texts come
   oldest first, until the budget is spent.
2. A text takes pages as it needs them: to have n tokens in the cache after the step, it needs
   ceil(n / page_tokens) pages. If a decoding text needs a page and none is free, the youngest running text is
   **preempted**: it gives all its pages back and computes nothing. This repeats until there is a page, or the text
   itself was the youngest and is preempted.
3. **Then prompts.** Running texts with more than one token left, oldest first, compute as many of these as budget and
   free pages allow, perhaps none. They preempt no text.
4. **Then new texts**, unless this step preempted one. Waiting texts begin in their order, while fewer than `most`
   texts run, some budget is left, and there are enough free pages for *all* tokens of the text. In this step no other
   text can have these pages, and the text computes as many tokens as the budget allows. The first text that can't
   begin keeps all behind it waiting.

`running` and `waiting` are lists of dicts, and a running text holds no more pages than its tokens in the cache need.
The arguments must not be changed.
""",
    hints=(
        "Keep three things up to date while you go through the rules: budget, free pages, and the texts that "
        "still run. Which of them does a preemption change?",
        "Pages that a text needs for `count` more tokens: `ceil((computed + count) / page_tokens) - pages`. The most "
        "tokens that pages allow: `(pages + free_pages) * page_tokens - computed`.",
        "In rule 2, `while text in alive and needed > free_pages:` pop the last of `alive`, add its pages to the free "
        "ones, and write down its name; afterwards give the text its token only if it's still in `alive`.",
    ),
)  # fmt: skip


def schedule_with(
    *, oldest=False, keeps=False, prompts_first=False, admits=False, most_counts=True, skips=False, part=False,
    leaves_one=False, one_victim=False, spends=True,
):  # fmt: skip
    def fn(running, waiting, free, S, budget, most):
        pages = {text["name"]: text["pages"] for text in running}
        alive, tokens, preempted, admitted = list(running), {}, [], []
        free, budget = int(free), int(budget)

        def needed(text, count):
            return max(0, -(-(text["computed"] + count) // S) - pages[text["name"]])

        def prompts():
            nonlocal free, budget
            for text in list(alive):
                left = text["length"] - text["computed"]
                if left < 2 or text["name"] in tokens:
                    continue
                room = (pages[text["name"]] + free) * S - text["computed"]
                count = min(left - leaves_one, budget, room)
                if count > 0:
                    free -= needed(text, count)
                    pages[text["name"]] += needed(text, count)
                    tokens[text["name"]] = count
                    budget -= count

        def decode():
            nonlocal free, budget
            for text in list(running):
                if text not in alive or text["length"] - text["computed"] > 1 or budget < 1:
                    continue
                tries = 0
                while text in alive and needed(text, 1) > free and not (one_victim and tries):
                    tries += 1
                    victim = alive.pop(0 if oldest else -1)
                    if not keeps:
                        free += pages[victim["name"]]
                    tokens.pop(victim["name"], None)
                    preempted.append(victim["name"])
                if text in alive and needed(text, 1) <= free:
                    free -= needed(text, 1)
                    pages[text["name"]] += needed(text, 1)
                    tokens[text["name"]] = 1
                    budget -= spends

        for stage in (prompts, decode) if prompts_first else (decode, prompts):
            stage()
        for text in waiting if admits or not preempted else []:
            whole = -(-text["length"] // S)
            if part:
                whole = -(-min(text["length"], max(budget, 1)) // S)
            if (most_counts and len(alive) == most) or budget < 1 or whole > free:
                if skips:
                    continue
                break
            alive.append({**text, "computed": 0, "pages": 0})
            pages[text["name"]] = 0
            admitted.append(text["name"])
            free -= whole
            tokens[text["name"]] = min(text["length"], budget)
            budget -= tokens[text["name"]]
        return tokens, preempted, admitted

    return fn


right_plan = schedule_with()


def plans_agree(fn, t, running, waiting, free, S, budget, most, why):
    given = copy.deepcopy((running, waiting))
    tokens, preempted, admitted = fn(running, waiting, free, S, budget, most)
    t.equal((running, waiting), given, why="the arguments after the call")
    want = right_plan(*given, free, S, budget, most)
    told = other_tokens(dict(tokens), want, running, waiting)
    lacking = [x for x in running if x["length"] == x["computed"] + 1 > x["pages"] * S]
    if want[1] and lacking:
        told += f"; the first to need a page is {lacking[0]['name']!r}, which holds {lacking[0]['pages']} of {S} "
        told += f"and has {lacking[0]['length']} tokens"
    t.equal(dict(tokens), want[0], why=f"tokens of each text; {told}: {why}")
    told = ""
    roomy = [text for text in running if text["length"] <= text["pages"] * S]
    if list(preempted) and not want[1]:
        told = "; no text lacks a page"
        for text in roomy[:1]:
            told += f": {text['name']!r} has pages for {text['pages'] * S} tokens and needs them for {text['length']}"
    t.equal(list(preempted), want[1], why=f"texts that are preempted{told}, {why}")
    t.equal(list(admitted), want[2], why=f"texts that begin, {why}")


def other_tokens(got, plan, running, waiting):
    """The first text that computes another number of tokens than it should, what it is doing, and why it shouldn't."""
    want, preempted, admitted = plan
    for text in [*running, *waiting]:
        name, left = text["name"], text["length"] - text.get("computed", 0)
        g, w = got.get(name, 0), want.get(name, 0)
        doing = (
            "begins" if text in waiting else "decodes" if left == 1 else f"has {left} tokens to go"
        )
        if g < w and left > 1:
            limit = "the budget allows" if text in waiting else "budget and free pages allow"
            rest = f"as many of its {left} tokens as {limit}"
            return f"{name!r}, which {doing}, computes {g}, want {w}, {rest}"
        if g != w:
            told = f"{name!r}, which {doing}, computes {g}, want {w}"
            before = waiting[: waiting.index(text)] if text in waiting else []
            stuck = [other["name"] for other in before if other["name"] not in admitted]
            if g < w and preempted:
                told += f": preempt {' and '.join(map(repr, preempted))}, and there are pages"
            elif name in preempted:
                told += ", because it is preempted"
            elif text in waiting and preempted:
                told += ", because this step preempts a text"
            elif text in running and left == 1 and g > w:
                told += ", because the budget is spent"
            elif stuck:
                told += f", because {stuck[0]!r} before it can't begin"
            return told
        if name in got and name not in want:
            return f"{name!r} computes nothing, so it isn't in the result"
    return "no others"


def runs(name, length, computed, S):
    return {"name": name, "length": length, "computed": computed, "pages": -(-computed // S)}


def waits(name, length):
    return {"name": name, "length": length}


@schedule.check("two texts decode, and the budget is spent")
def _(fn, t):
    texts = [runs("a", 6, 5, 4), runs("b", 7, 6, 4), runs("c", 6, 5, 4)]
    plans_agree(fn, t, texts, [], 0, 4, 2, 8, "three decoding texts, a budget of 2")
    plans_agree(fn, t, texts, [], 0, 4, 9, 8, "three decoding texts, a budget of 9")


@schedule.check("decode comes before prompts")
def _(fn, t):
    texts = [runs("a", 30, 8, 4), runs("b", 7, 6, 4)]
    plans_agree(
        fn,
        t,
        texts,
        [],
        9,
        4,
        8,
        8,
        "an older text with 22 tokens to go, a younger one that decodes",
    )
    plans_agree(fn, t, texts, [], 1, 4, 20, 8, "one free page for them")
    plans_agree(fn, t, [runs("a", 9, 4, 4)], [], 9, 4, 20, 8, "five tokens to go")


@schedule.check("a page is missing")
def _(fn, t):
    texts = [runs("a", 9, 8, 4), runs("b", 5, 4, 4), runs("c", 20, 7, 4)]
    plans_agree(fn, t, texts, [], 0, 4, 16, 8, "none is free, the youngest holds two")
    plans_agree(fn, t, texts[:2], [], 0, 4, 16, 8, "none is free, the youngest needs one too")
    plans_agree(fn, t, texts[1:2], [], 0, 4, 16, 8, "none is free, and the text is alone")
    texts[2] = runs("c", 20, 11, 4)
    plans_agree(fn, t, texts, [waits("d", 2)], 0, 4, 16, 8, "a page is left over, and a text waits")


@schedule.check("several must go")
def _(fn, t):
    texts = [runs("a", 5, 4, 4), runs("b", 5, 4, 4), runs("c", 5, 0, 4), runs("d", 6, 0, 4)]
    plans_agree(fn, t, texts, [], 0, 4, 16, 8, "the two youngest hold no page yet")


@schedule.check("new texts begin in order")
def _(fn, t):
    waiting = [waits("x", 6), waits("y", 20), waits("z", 3)]
    plans_agree(fn, t, [], waiting, 4, 4, 32, 8, "y needs five pages")
    plans_agree(fn, t, [], waiting, 8, 4, 32, 8, "there are just enough pages for all")
    plans_agree(fn, t, [], waiting, 9, 4, 8, 8, "a budget of 8")
    plans_agree(fn, t, [runs("a", 3, 2, 4)], waiting, 9, 4, 32, 2, "at most two texts")
    plans_agree(
        fn, t, [], [waits("x", 20), waits("y", 3)], 3, 4, 8, 8, "a budget of 8, pages for 12 of x"
    )
    plans_agree(fn, t, [], [], 3, 4, 8, 2, "nothing to do")


@schedule.check("anything")
def _(fn, t):
    for _ in range(120):
        S, names = int(t.rng.integers(1, 6)), iter("abcdefghijklmnop")
        texts = []
        for _ in range(int(t.rng.integers(0, 6))):
            length = int(t.rng.integers(1, 24))
            computed = length - 1 if t.rng.random() < 0.6 else int(t.rng.integers(0, length))
            texts.append(runs(next(names), length, computed, S))
        waiting = [
            waits(next(names), int(t.rng.integers(1, 16))) for _ in range(int(t.rng.integers(0, 4)))
        ]
        free, budget = int(t.rng.integers(0, 6)), int(t.rng.integers(1, 24))
        most = len(texts) + int(t.rng.integers(0, 3))
        why = f"{len(texts)} running, {len(waiting)} waiting, {free} free pages of {S}, a budget of {budget}"
        plans_agree(fn, t, texts, waiting, free, S, budget, most, why)


for name, hint, options in (
    ("oldest_first", "You preempt the oldest text, whose work is worth the most. Take the youngest: the last in "
     "the list.",
     {"oldest": True}),
    ("pages_kept", "A preempted text gives its pages back, and the text that needed one goes on with them.",
     {"keeps": True}),
    ("prompts_before_decode", "You let a prompt take the budget first, so every text that is being written waits "
     "for it. Decode first.",
     {"prompts_first": True}),
    ("admits_after_preempting", "A step that had to preempt a text has no pages to begin another one with.",
     {"admits": True}),
    ("more_than_most", "At most `most` texts may run at once.", {"most_counts": False}),
    ("overtaking", "A short text overtakes a long one that waits for pages, and so may all that come after. Stop "
     "at the "
     "first that can't begin.", {"skips": True}),
    ("pages_for_a_part", "You set pages aside for what this step computes of a new text. Then it begins and can't "
     "go on: "
     "take pages for all its tokens.", {"part": True}),
    ("one_victim", "One text less may not be enough: the youngest may have held no page. Repeat.",
     {"one_victim": True}),
    ("free_decode", "Decoded tokens count against the budget too.", {"spends": False}),
    ("leaves_one", "You leave the last token of a prompt to a later step. Compute all that budget and pages allow.",
     {"leaves_one": True}),
):  # fmt: skip
    mistaken(schedule, name, hint, schedule_with(**options))


# -------------------------------------------------------------------------------- speculative

speculative = Exercise(
    "24.speculative",
    title="Guesses that leave the distribution alone",
    function="accept",
    minutes=30,
    points=15,
    statement="""
A small model has guessed k tokens, one after another, and the large model has computed its probabilities for all of
them at once. Write `accept(draft, q_kV, p_kV, uniforms)`, which says what the large model makes of them.

- Guess number i, token x, is kept with probability min(1, p/q), where p and q are the two models' probabilities of x
  in row i: keep it if `uniforms[i] * q < p`. Stop at the first guess that isn't kept.
- Then one token is added. If guess i was not kept, the added token is drawn from the positive part of
  `p_kV[i] - q_kV[i]`, divided by its sum. If all guesses were kept, it is drawn from the last row of `p_kV`.
- To draw from probabilities, take the first token at which their cumulative sum exceeds `uniforms[-1]` times their
  sum.
- The result is the tokens that were kept, followed by the one that was added. k may be 0.

Whatever the small model guesses, the tokens are distributed exactly as if the large model had drawn them without help.
""",
    hints=(
        "Three things decide: which guesses are kept, which probabilities the added token is drawn from, and how it is "
        "drawn. Take them one at a time, and begin with k = 0, where only the third is left.",
        "`np.maximum(p_kV[i] - q_kV[i], 0)` is the part of each token's probability that guesses don't provide. Its "
        "sum is below 1, so the number that you compare cumulative sums with is `uniforms[-1] * sum`.",
        "`for ... else` runs the `else` part when no guess was rejected. `np.searchsorted(np.cumsum(rest), u, "
        "side='right')` is the first place where the cumulative sum exceeds u.",
    ),
)  # fmt: skip


def accept_with(
    *,
    residual=True,
    normal=True,
    cut=True,
    last=True,
    ratio=True,
    bonus=True,
    stops=True,
    row=0,
    inverse=False,
    uniform=None,
    positive=True,
    drawn=True,
    strictly=True,
    certain=False,
    none_is=-1,
    turned=False,
):
    def fn(draft, q, p, uniforms):
        tokens, rest = [], None
        for i, token in enumerate(draft):
            left, right = (p[i, token], q[i, token]) if inverse else (q[i, token], p[i, token])
            judged = uniforms[0 if uniform == "first" else i] * (left if ratio else 1)
            judged = left if certain else judged
            kept = judged < right if strictly and not certain else judged <= right
            if kept:
                tokens.append(int(token))
                continue
            if rest is None:
                rest = np.maximum(p[i + row] - q[i], 0 if cut else -1) if residual else p[i]
                rest = rest if positive else np.abs(p[i] - q[i])
                rest = np.maximum(q[i] - p[i], 0) if turned else rest
            if stops:
                break
        if rest is None:
            if not bonus:
                return tokens
            rest = p[len(draft) if last else len(draft) - 1]
        through = np.cumsum(rest, dtype=np.float64)
        total = through[-1] if normal else 1.0
        u = uniforms[len(tokens) if uniform == "reused" else -1]
        found = int(np.searchsorted(through, u * total, side="right" if strictly else "left"))
        found = found if drawn else int(np.argmax(rest))
        found = none_is if found == len(rest) and none_is >= 0 else found
        return [*tokens, min(found, len(rest) - 1)]

    return fn


def models(t, k, V):
    q, p = t.rng.dirichlet(np.ones(V), k), t.rng.dirichlet(np.ones(V), k + 1)
    return q.reshape(k, V), p


def accepts(fn, t, draft, q, p, uniforms, why):
    copies = [np.array(x) for x in (q, p, uniforms)]
    got = fn(list(draft), *copies)
    t.true(
        isinstance(got, list) and all(type(x) is int for x in got),
        "the result is not a list of Python ints",
        str(type(got)),
    )
    V = p.shape[1]
    told = f"token {max(got, default=0)} is not one of {V}; compare with uniforms[-1] times the cumulative sum's last"
    t.true(all(0 <= token < V for token in got), f"{told}: {why}", got)
    want = accept_with()(draft, q, p, uniforms)
    if got != want and any(fn(list(draft), *map(np.array, copies)) != got for _ in range(9)):
        why = (
            f"the same arguments give other tokens the next time: draw with `uniforms` alone: {why}"
        )
    if len(got) != len(want):
        told = f"{len(want) - 1} of {len(draft)} guesses are kept and a token is added"
        i = min(len(got), len(want)) - 1
        if i in range(len(draft)):
            judged = uniforms[i] * q[i, draft[i]], p[i, draft[i]]
            told += f"; for guess {i} uniforms * q is {judged[0]:.3g} and p is {judged[1]:.3g}"
        passing = [x for i, x in enumerate(draft) if uniforms[i] * q[i, x] < p[i, x]]
        if len(got) == len(passing) + 1 and got[:-1] == passing != want[:-1]:
            told += "; nothing after the first guess that isn't kept counts"
        elif len(want) <= len(draft) and got[: len(want)] == [*want[:-1], draft[len(want) - 1]]:
            told += f"; guess {len(want) - 1} isn't kept, and yet it's in the result"
        t.equal(got, want, why=f"{told}: {why}")
    elif got[:-1] == want[:-1]:
        i, x = len(want) - 1, got[-1]
        row = "the last row of p" if i == len(draft) else f"row {i} of both models"
        if i < len(draft) and p[i, x] <= q[i, x]:
            row += f". Token {x} has p = {p[i, x]:.3g} and q = {q[i, x]:.3g} there: the positive part of p - q is 0"
        t.equal(
            got,
            want,
            why=f"the guesses that are kept are right; the token added comes from {row}: {why}",
        )
    t.equal(got, want, why=why)


@speculative.check("no guess")
def _(fn, t):
    for V in (3, 7):
        q, p = models(t, 0, V)
        for _ in range(5):
            accepts(fn, t, [], q, p, t.rng.random(1), "k = 0: a token of the large model")


@speculative.check("guesses that are all kept")
def _(fn, t):
    k, V = int(t.rng.integers(2, 5)), 5
    p = models(t, k, V)[1]
    draft = [int(x) for x in np.argmax(p[:k], axis=1)]
    for _ in range(5):
        accepts(fn, t, draft, p[:k], p, t.rng.random(k + 1), f"two equal models, k = {k}")


@speculative.check("a guess that the large model never makes")
def _(fn, t):
    q, p = models(t, 3, 6)
    draft = [int(x) for x in t.rng.integers(0, 6, 3)]
    p[1, draft[1]] = 0
    p[1] /= p[1].sum()
    p[0], q[0] = q[0], q[0]
    for _ in range(8):
        accepts(fn, t, draft, q, p, t.rng.random(4), "probability 0 for the second guess")


@speculative.check("any guesses")
def _(fn, t):
    for _ in range(60):
        k, V = int(t.rng.integers(1, 5)), int(t.rng.integers(2, 9))
        q, p = models(t, k, V)
        draft = [int(t.rng.choice(V, p=row)) for row in q]
        accepts(fn, t, draft, q, p, t.rng.random(k + 1), f"k = {k}, {V} tokens")


@speculative.check("numbers that are equal")
def _(fn, t):
    p = np.array([[0.25, 0.25, 0.5]] * 2)
    accepts(
        fn,
        t,
        [],
        p[:0],
        p[:1],
        [0.25],
        "the sum after token 0 equals uniforms[-1], and doesn't exceed it",
    )
    accepts(
        fn,
        t,
        [0],
        np.array([[0.5, 0.25, 0.25]]),
        p,
        [0.5, 0.5],
        "uniforms[0] * q equals p: not kept",
    )


@speculative.check("the distribution of the large model")
def _(fn, t):
    V, draws = 4, 4000
    q, p = models(t, 1, V)
    counts = np.zeros(V)
    drafts = t.rng.choice(V, draws, p=q[0])
    for draft, uniforms in zip(drafts, t.rng.random((draws, 2)), strict=True):
        counts[fn([int(draft)], q.copy(), p.copy(), uniforms)[0]] += 1
    expected = np.maximum(draws * p[0], 1e-9)
    away = float(np.sum((counts - expected) ** 2 / expected))
    why = f"{draws} first tokens are spread as {np.round(counts / draws, 3)}, and p is {np.round(p[0], 3)}"
    t.true(away < 40, why, away)


for name, hint, options in (
    ("draws_from_p", "After a rejection you draw from p. Tokens that q guesses too seldom then get too little, "
     "and those that it guesses too often are given a second chance. Draw from the positive part of p - q.",
     {"residual": False}),
    ("not_cut", "You draw from p - q as it is. Where q is larger it is below 0, and the cumulative sum falls: set "
     "those to 0 first.", {"cut": False}),
    ("row_before_the_last", "When all guesses are kept you draw from the row that judged the last of them. p_kV has "
     "one more, for the token that comes after.", {"last": False}),
    ("not_divided", "The positive part of p - q doesn't sum to 1. Compare the cumulative sum with uniforms[-1] "
     "times its "
     "sum.", {"normal": False}),
    ("nothing_exceeds", "The positive part of p - q doesn't sum to 1, so nothing may exceed uniforms[-1] and you take "
     "token 0. Compare with uniforms[-1] times the sum.", {"normal": False, "none_is": 0}),
    ("kept_if_likelier", "You keep a guess only if p is at least q. Others are kept with probability p / q: that is "
     "what `uniforms[i]` decides.", {"certain": True}),
    ("no_ratio", "You keep a guess with probability p. It was drawn with probability q already: keep it with "
     "min(1, p/q).",
     {"ratio": False}),
    ("absolute_difference", "You draw from |p - q|. Where q is larger nothing is missing: take the positive part.",
     {"positive": False}),
    ("difference_turned_round", "You draw from the positive part of q - p, which are tokens guessed too often: "
     "it's p - q.", {"turned": True}),
    ("takes_the_likeliest", "You add the likeliest token. It's drawn, with uniforms[-1].", {"drawn": False}),
    ("guess_s_own_uniform", "You draw the added token with the number that judged a guess. It has one of its own, the "
     "last.", {"uniform": "reused"}),
    ("keeps_equals", "You keep a guess where uniforms[i] * q equals p, and take a token where the sum equals what it "
     "must exceed.", {"strictly": False}),
    ("no_last_token", "When all guesses are kept, the large model has one more row, which costs nothing: draw a "
     "token from it.",
     {"bonus": False}),
    ("goes_on", "You go on after a rejected guess. The later guesses follow a token that is not in the text.",
     {"stops": False}),
    ("next_row", "The replacement of guess i comes from row i, the row that judged it.", {"row": 1}),
    ("inverse", "You keep a guess with probability q/p. A token that the large model likes more than the small one is "
     "always kept: it's p/q.", {"inverse": True}),
    ("one_uniform", "Each guess has a random number of its own. With one for all, the guesses aren't kept "
     "independently.",
     {"uniform": "first"}),
):  # fmt: skip
    mistaken(speculative, name, hint, accept_with(**options))
