import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from minitext.book.grading import Exercise


def mistaken(exercise, name, hint, fn):
    fn.__name__ = name
    exercise.mutant(hint)(fn)


# ---------------------------------------------------------------------------------- loss_mask

loss_mask = Exercise(
    "26.loss_mask",
    title="Learn what the assistant says",
    function="answer_mask",
    minutes=25,
    points=15,
    statement="""
Write `answer_mask(messages, render, encode, end)`. It turns a conversation into tokens and targets, and marks the
targets that the assistant says.

- `render(messages, header)` is a chat template. It writes the messages as text. With `header=True` it adds what comes
  before an assistant's turn, such as `<|assistant|>`. It can render the first few messages alone.
- `encode(text)` returns the ids, and each token's (start, stop) in the text. Tokens are all the ids but the last, and
  targets all but the first.
- The assistant says what comes after the header that opens its turn, up to and including the last `end` of its turn. It
  says neither the header nor what the template writes after `end`. There may be several such turns.
- A token is the assistant's if any of its characters is.
- Some templates change earlier turns, or leave one out. For message n of the assistant, the whole text must begin with
  `render(messages[:n + 1], False)`, which itself must begin with `render(messages[:n], True)`, and there must be an
  `end` after the header. Otherwise raise `ValueError`.

A conversation without the assistant has a mask of zeros.
""",
    hints=(
        "Don't look for the content in the text: the user may have said the same, and a template may change it. What "
        "does `render` write if you give it only the messages up to a turn?",
        "For message n of the assistant, what it says begins at `len(render(messages[:n], True))` and ends in "
        "`render(messages[:n + 1], False)`. Both must be beginnings of the whole text.",
        "With a list of those beginnings and ends, (a, b): `said = [any(start < b and a < stop for a, b in spans) for "
        "start, stop in offsets]`. The mask of targets is `said[1:]`. A span's b is `after.rindex(end, len(before)) + "
        "len(end)`.",
    ),
)


def answer_mask_with(
    *, shift=1, turns="all", header=False, ended=True, after=False, find=False, refuses="both",
    begins=False, until=False, first_end=False, any_end=False, roles=("assistant",),
):  # fmt: skip
    def fn(messages, render, encode, end):
        text = render(messages, False)
        spoken = []
        for n, message in enumerate(messages):
            if message["role"] not in roles:
                continue
            header_too = header or message["role"] != "assistant"
            before = render(messages[:n], not header_too)
            whole = render(messages[: n + 1], False)
            if refuses in ("both", "whole") and not text.startswith(whole):
                raise ValueError("rewritten")
            if refuses in ("both", "header") and not whole.startswith(before):
                raise ValueError("another header")
            start = len(before)
            stop = whole.find(end, start) if first_end else whole.rfind(end, start)
            if any_end:
                stop = whole.rfind(end)
            elif stop < 0 and refuses:
                raise ValueError("no end")
            stop += len(end) if ended else 0
            stop = len(whole) if after else stop
            if find:
                start = text.find(message["content"].strip())
                stop = start + len(message["content"].strip()) + len(end)
            spoken.append((start, len(text) if until else stop))
        spoken = spoken[-1:] if turns == "last" else spoken[:1] if turns == "first" else spoken
        ids, offsets = encode(text)
        if begins:
            said = [int(any(a <= s < b for a, b in spoken)) for s, _ in offsets]
        else:
            said = [int(any(s < b and e > a for a, b in spoken)) for s, e in offsets]
        return ids[:-1], ids[1:], said[shift:] if shift else said[:-1]

    return fn


class Template:
    """A chat template with words of its own."""

    def __init__(
        self,
        t,
        *,
        drops=False,
        forgets=False,
        trims=False,
        glued=False,
        thinks=False,
        endless=False,
    ):
        a, b = t.rng.permutation(["<|im_start|>", "[turn]", "<s>", "###"])[:2]
        self.open, self.end = str(a), "<|end|>" if t.rng.random() < 0.5 else "</t>"
        self.bos = str(b) if t.rng.random() < 0.5 else ""
        self.middle = ":" if glued else "\n"
        self.drops, self.forgets, self.trims = drops, forgets, trims
        self.thought, self.endless = "[think]" if thinks else "", endless

    def __call__(self, messages, header):
        text = self.bos
        for n, message in enumerate(messages):
            content = message["content"].strip() if self.trims else message["content"]
            if message["role"] == "assistant" and self.drops:
                continue
            if message["role"] == "assistant" and self.forgets and n < len(messages) - 1:
                content = content.split(" ")[-1]  # without what it thought
            end = "" if self.endless and message["role"] == "assistant" else self.end
            text += f"{self.open}{message['role']}{self.middle}{content}{end}\n"
        return text + (f"{self.open}assistant{self.middle}{self.thought}" if header else "")


def encoder(template, whole=()):
    """Words, marks and special tokens, each character of which is in one token; `whole` are tokens that cross."""
    special = [template.open, template.end, *([template.bos] if template.bos else []), *whole]
    pattern = re.compile("|".join(map(re.escape, special)) + r"|[a-z]+|[0-9]|\s|.", re.DOTALL)

    def encode(text):
        found = list(pattern.finditer(text))
        return [sum(map(ord, m[0])) + 7 * len(m[0]) for m in found], [m.span() for m in found]

    return encode


WORDS = (
    "red",
    "green",
    "sea",
    "lamp",
    "why",
    "how",
    "4",
    "27",
    "903",
    "stone",
    ",",
    "yes",
    "no",
    "?",
)


def says(t, count=None):
    count = int(t.rng.integers(2, 7)) if count is None else count
    return " ".join(str(word) for word in t.rng.choice(WORDS, count))


def talk(t, roles, contents=None):
    contents = contents or [says(t) for _ in roles]
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def part_of(messages, template, end, start, stop):
    """Where in a rendered conversation the characters from start to stop are."""
    for n, message in enumerate(messages):
        turn = template(messages[: n + 1], False)
        if start >= len(turn):
            continue
        if message["role"] != "assistant":
            return f"in the {message['role']}'s turn"
        header = len(template(messages[:n], True))
        ends = turn.rindex(end, header)
        if start < header:
            return "in the header" + (" and in the answer" if stop > header else "")
        if start < ends:
            return "in the assistant's answer"
        return "its `end`" if start == ends else "after its `end`"
    return "after the last turn"


def masks(fn, t, messages, template, why, whole=()):
    encode = encoder(template, whole)
    got = fn(messages, template, encode, template.end)
    want = answer_mask_with()(messages, template, encode, template.end)
    t.true(
        isinstance(got, (tuple, list)) and len(got) == 3, f"want three lists, {why}", str(type(got))
    )
    ids = encode(template(messages, False))[0]
    told = {
        "These are all ids": ids,
        "These are all ids but the last": ids[:-1],
        "These are all ids but the first": ids[1:],
    }
    for name, g, w in zip(("tokens", "targets"), got, want, strict=False):
        t.equal([int(i) for i in g], w, f"{name}, {why}", mistakes=told)
    marks, told = [int(i) for i in got[2]], ""
    text = template(messages, False)
    spans = encode(text)[1][1:]
    words = [text[a:b] for a, b in spans]
    wrong = [n for n, (g, w) in enumerate(zip(marks, want[2], strict=False)) if g != w]
    if wrong and len(marks) == len(want[2]):
        n = wrong[0]
        before = "".join(words[max(0, n - 3) : n])
        told = (
            f" you {'mark' if marks[n] else 'leave out'} {words[n]!r} after {before!r}, which is "
        )
        told += f"{part_of(messages, template, template.end, *spans[n])};"
    said = [0, *want[2]]
    several = {
        "It has an entry for each id; want one for each target": said,
        "It belongs to the tokens; want that of the targets, one position further on": said[:-1],
    }
    t.equal(marks, want[2], f"the mask of targets:{told} {why}", mistakes=several)


@loss_mask.check("one question, one answer")
def _(fn, t):
    for _ in range(3):
        masks(fn, t, talk(t, ["user", "assistant"]), Template(t), "a question and its answer")


@loss_mask.check("several turns")
def _(fn, t):
    masks(fn, t, talk(t, ["user", "assistant"] * 3), Template(t), "three questions, three answers")
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    masks(fn, t, talk(t, roles), Template(t), "the last turn is the user's")
    masks(fn, t, talk(t, ["assistant", "user", "assistant"]), Template(t), "the assistant begins")
    masks(fn, t, talk(t, ["user", "assistant", "assistant"]), Template(t), "two turns in a row")


@loss_mask.check("the user says the same")
def _(fn, t):
    same = says(t, 4)
    messages = talk(t, ["user", "assistant", "user", "assistant"], [same, same, same, same])
    masks(fn, t, messages, Template(t), "all turns have the same text")


@loss_mask.check("spaces, an empty answer, an answer with the end in it")
def _(fn, t):
    messages = talk(t, ["user", "assistant", "user"], [says(t), f"  {says(t)}\n ", says(t)])
    masks(fn, t, messages, Template(t, trims=True), "a template that strips spaces")
    masks(fn, t, messages, Template(t), "an answer with spaces around it")
    empty = talk(t, ["user", "assistant"], [says(t), ""])
    masks(fn, t, empty, Template(t), "an empty answer: its end is still said")
    template = Template(t)
    messages = talk(t, ["user", "assistant"], [says(t), f"{says(t)}{template.end} {says(t)}"])
    masks(fn, t, messages, template, "the text of `end` is also in the answer")


@loss_mask.check("tokens across the border")
def _(fn, t):
    template = Template(t, glued=True)
    messages = talk(t, ["user", "assistant"], [says(t), f" {says(t)}"])
    masks(fn, t, messages, template, "a token has the header's end and a space", (": ",))


@loss_mask.check("no assistant")
def _(fn, t):
    masks(fn, t, talk(t, ["system", "user"]), Template(t), "nothing that the assistant says")
    masks(fn, t, talk(t, ["user"], [""]), Template(t), "one empty turn")


@loss_mask.check("templates that rewrite")
def _(fn, t):
    messages = talk(t, ["user", "assistant", "user", "assistant"], [says(t, 3) for _ in range(4)])
    for kind, why in (
        ("drops", "a template that drops what the assistant said"),
        ("forgets", "a template that forgets what the assistant said"),
        ("thinks", "a template whose header goes on with [think], which isn't in the whole text"),
        ("endless", "a template that writes no `end` after the assistant's turns"),
    ):
        template = Template(t, **{kind: True})
        t.raises(ValueError, lambda s=template: fn(messages, s, encoder(s), s.end), why=why)


for name, hint, options in (
    ("not_shifted", "You mark the tokens that the assistant says. The mask belongs to targets, which are one "
     "position further on.",
     {"shift": 0}),
    ("last_turn", "Only the last turn of the assistant is marked. It says all of them.", {"turns": "last"}),
    ("first_turn", "Only the first turn of the assistant is marked.", {"turns": "first"}),
    ("header_too", "You count the header. When the model answers, the template has written it already.",
     {"header": True}),
    ("without_end", "The token that ends the turn isn't marked. A model that doesn't learn it never stops.",
     {"ended": False}),
    ("and_after", "What the template writes after `end` isn't said by the assistant: it has stopped by then.",
     {"after": True}),
    ("finds_content", "You look for the content in the text, and find it where somebody else said it, or not at all.",
     {"find": True, "refuses": False}),
    ("to_the_end", "You mark everything after the first header. The user's later turns are marked too.",
     {"until": True}),
    ("where_it_begins", "A token that begins in the header and goes on into the answer is the assistant's too: one "
     "of its characters is.", {"begins": True}),
    ("everybody", "You mark what the user says as well. Only the assistant's turns are learned.",
     {"roles": ("assistant", "user")}),
    ("finds_content_in_time", "You look for the content in the text, and find it where somebody else said it, or not "
     "at all.", {"find": True}),
    ("first_end", "The answer itself has the text of `end` in it. Its turn goes on to the last one.",
     {"first_end": True}),
    ("trusting", "You trust the template. Compare what it wrote for the first messages with the beginning of the "
     "whole text, and raise ValueError where they differ.", {"refuses": False}),
    ("trusts_the_header", "You trust the header. What the template writes before the answer may not be in the "
     "whole text.", {"refuses": "whole"}),
    ("trusts_the_turn", "You compare what comes before the answer. The turn itself may be rewritten, too: compare the "
     "conversation up to its end.", {"refuses": "header"}),
    ("end_of_another", "You take the last `end` wherever it is. If the turn has none, that's the end of a turn before.",
     {"any_end": True}),
):  # fmt: skip
    mistaken(loss_mask, name, hint, answer_mask_with(**options))


# --------------------------------------------------------------------------------- lora_merge

lora_merge = Exercise(
    "26.lora_merge",
    title="Merge an adapter, and take it out again",
    function="merge",
    minutes=10,
    points=10,
    statement="""
Write `merge(w, a, b, alpha, sign)`: the weights with an adapter added (`sign=1`) or taken out again (`sign=-1`).

- The adapter changes x w to x w + (alpha / R) (x a) b, where R is the number of columns of a. After merging,
  x w alone gives the same.
- There may be any number of dimensions before D and F, such as one for the layers. Each matrix [D, F] has an adapter of
  its own.
- The sum is formed in float32, and the result has the type of w.
""",
    hints=(
        "What matrix do you have to add to w so that x times it is (alpha / R) (x a) b?",
        "It's (alpha / R) a b, a product of matrices that sums over R, for each of the dimensions in front.",
        "`jnp.einsum('...dr,...rf->...df', a, b)`, then `w.astype(jnp.float32) + sign * alpha / R * ...`, and at the "
        "end `.astype(w.dtype)`.",
    ),
)


def merge_with(
    *, scale="alpha/r", sign=True, wide=True, layer=None, as_w=True, weights=True, product="each"
):
    def fn(w, a, b, alpha, s):
        if layer is not None:
            a, b = (jnp.broadcast_to(x[(layer,) * (x.ndim - 2)], x.shape) for x in (a, b))
        rank = a.shape[-2] if scale == "alpha/d" else a.shape[-1]
        factor = {"alpha": alpha, "alpha/r": alpha / rank, "alpha/d": alpha / rank, "1": 1.0,
                  "root": alpha / rank**0.5, "floor": alpha // rank}[scale]  # fmt: skip
        if product == "dot":
            change = factor * jnp.dot(a, b)
        elif product == "transposed":
            change = factor * a @ b.mT
        else:
            change = factor * jnp.einsum("...dr,...rf->...df", a, b)
        s = s if sign else 1
        base = w.astype(jnp.float32)
        base = base if weights else 0 * base
        out = base + s * change if wide else w + s * change.astype(w.dtype)
        return out.astype(w.dtype) if as_w else out

    return fn


def adapter(t, lead, D, F, R):
    w, a, b = (t.rng.normal(size=(*lead, *s)) for s in ((D, F), (D, R), (R, F)))
    return [jnp.asarray(x, jnp.float32) for x in (w, a, b)]


@lora_merge.check("one matrix")
def _(fn, t):
    for D, F, R, alpha in ((7, 5, 3, 2.0), (4, 9, 1, 16.0), (6, 6, 4, 0.5)):
        w, a, b = adapter(t, (), D, F, R)
        why = f"D = {D}, F = {F}, R = {R}, alpha = {alpha}"
        told = {
            "You divide alpha by D. R is the number of columns of a": w + alpha / D * a @ b,
            "You divide alpha by F. R is the number of columns of a": w + alpha / F * a @ b,
            "You multiply by R instead of dividing by it": w + alpha * R * a @ b,
            "You divide by alpha: the adapter counts alpha / R": w + R / alpha * a @ b,
            "You add the scale to the weights too": alpha / R * (w + a @ b),
            "You take out what should be added": w - alpha / R * a @ b,
        }
        t.close(
            fn(w, a, b, alpha, 1), merge_with()(w, a, b, alpha, 1), 1e-5, 1e-5, why, mistakes=told
        )


@lora_merge.check("taken out")
def _(fn, t):
    w, a, b = adapter(t, (), 6, 8, 2)
    merged = merge_with()(w, a, b, 5.0, 1)
    t.close(fn(merged, a, b, 5.0, -1), w, 1e-5, 1e-5, "merged with alpha = 5, then taken out")


@lora_merge.check("stacked layers")
def _(fn, t):
    for lead in ((3,), (2, 4)):
        w, a, b = adapter(t, lead, 5, 7, 2)
        t.close(fn(w, a, b, 3.0, 1), merge_with()(w, a, b, 3.0, 1), 1e-5, 1e-5, f"{lead} in front")


@lora_merge.check("bfloat16 weights")
def _(fn, t):
    w, a, b = adapter(t, (2,), 40, 30, 4)
    w = (10 * w).astype(jnp.bfloat16)
    got, want = fn(w, a, b, 3.0, 1), merge_with()(w, a, b, 3.0, 1)
    t.true(
        getattr(got, "dtype", None) == jnp.bfloat16,
        "want the type of w, bfloat16",
        str(getattr(got, "dtype", 0)),
    )
    # Sums of products in another order may fall on the other side of a rounding.
    off = np.asarray(got, np.float32) != np.asarray(want, np.float32)
    t.true(
        off.mean() < 0.01,
        f"{off.mean():.0%} of the values are not rounded once, from float32",
        np.asarray(got),
    )


for name, hint, options in (
    ("alpha_alone", "You multiply by alpha. It is divided by R, the columns of a.", {"scale": "alpha"}),
    ("no_scale", "The adapter is multiplied by alpha / R, not by 1.", {"scale": "1"}),
    ("root", "You divide alpha by the square root of R. That is rsLoRA; here it's R.", {"scale": "root"}),
    ("divided_by_d", "You divide by D. R is the number of columns of a.", {"scale": "alpha/d"}),
    ("rounded_down", "You round alpha / R down. `//` is not `/`.", {"scale": "floor"}),
    ("change_alone", "You return what the adapter changes, without the weights.", {"weights": False}),
    ("always_adds", "sign = -1 must take the adapter out.", {"sign": False}),
    ("first_layer", "All layers get the adapter of the first.", {"layer": 0}),
    ("rounded_twice", "You round the change to bfloat16 before you add it. Add in float32 and round once.",
     {"wide": False}),
    ("float32_result", "The result has the type of w.", {"as_w": False}),
    ("dot", "`jnp.dot` multiplies every matrix of a stack with every matrix of the other. Multiply them pair by pair.",
     {"product": "dot"}),
    ("transposed", "Your product doesn't sum over R. With a [D, R] and b [R, F] it's a b, neither transposed.",
     {"product": "transposed"}),
):  # fmt: skip
    mistaken(lora_merge, name, hint, merge_with(**options))


# ---------------------------------------------------------------------------------- lora_rows

lora_rows = Exercise(
    "26.lora_rows",
    title="Many adapters in one batch",
    function="lora_rows",
    minutes=35,
    points=20,
    statement="""
A server has one copy of the weights and N adapters, and each row of a batch may want a different one. Write
`lora_rows(x_BTD, w_DF, a_NDR, b_NRF, scale_N, which_B)`, a linear layer for this.

- Row i of the result is x w + s (x a) b, with the scale s and the matrices a and b of adapter `which_B[i]`. Where that
  is -1, the row has no adapter and is exactly x w.
- w is multiplied once for all rows. No array of the size of w or larger is made along the way: no merged weights.
- The work doesn't grow with N: no product reads all adapters, and no loop goes over them.
- Adapters that no row uses may hold anything, even NaN: their slots may have been freed. Neither the result nor a
  gradient may be touched by them.
- It works under `jax.jit`, with `which_B` traced.

In the checks that look at the sizes of arrays, B T and B R are both smaller than D and F.
""",
    hints=(
        "In which order do you have to multiply x, a and b so that no matrix of D times F occurs? And how do you get "
        "from N adapters to the B that are wanted?",
        "`a_NDR[which_B]` is [B, D, R], one adapter for each row. What does the index -1 select, and what is 0 times "
        "NaN?",
        "`used = (which_B >= 0)[:, None, None]`, `a = jnp.where(used, a_NDR[which_B], 0)`, likewise b and the scale; "
        "then `einsum('btd,bdr->btr')`, the scale, `einsum('btr,brf->btf')`, and add x w.",
    ),
)


def lora_rows_with(*, how="gather", none="select", scaled="each", weights=True, by_rank=False):
    def fn(x_BTD, w_DF, a_NDR, b_NRF, scale_N, which_B):
        used = (which_B >= 0)[:, None, None]
        base = jnp.einsum("btd,df->btf", x_BTD, w_DF)
        if how == "loop":
            for n in range(len(a_NDR)):
                its = (which_B == n)[:, None, None]
                low = jnp.einsum("btd,dr->btr", x_BTD, jnp.where(its.any(), a_NDR[n], 0))
                added = jnp.einsum("btr,rf->btf", low, jnp.where(its.any(), b_NRF[n], 0))
                base = base + jnp.where(its, added * jnp.where(its.any(), scale_N[n], 0), 0)
            return base
        if how == "one_hot":
            hot_BN = jax.nn.one_hot(which_B, len(a_NDR))
            clean = [jnp.nan_to_num(y) for y in (a_NDR, b_NRF)]
            a, b = (jnp.einsum("bn,nxy->bxy", hot_BN, y) for y in clean)
        elif how == "first":
            a, b = (jnp.broadcast_to(y[which_B[0]], (len(which_B), *y.shape[1:])) for y in (a_NDR, b_NRF))  # fmt: skip
        elif how == "row":
            a, b = (y[jnp.arange(len(which_B)) % len(y)] for y in (a_NDR, b_NRF))
        elif none == "clamp":
            a, b = (y[jnp.maximum(which_B, 0)] for y in (a_NDR, b_NRF))
        else:
            a, b = a_NDR[which_B], b_NRF[which_B]
        scale = {"each": scale_N[which_B], "one": jnp.ones(len(which_B)),
                 "twice": scale_N[which_B] ** 2, "first": jnp.full(len(which_B), scale_N[0]),
                 "row": scale_N[jnp.arange(len(which_B)) % len(scale_N)]}[scaled][:, None, None]  # fmt: skip
        if none == "select":
            a, b, scale = (jnp.where(used, y, 0) for y in (a, b, scale))
        elif none == "multiply":
            scale = scale * used
        elif none == "clamp":
            scale = jnp.where(used, scale, 0)
        if how == "merged":
            w_BDF = w_DF + scale * jnp.einsum("bdr,brf->bdf", a, b)
            return jnp.einsum("btd,bdf->btf", x_BTD, w_BDF)
        low = jnp.einsum("btd,bdr->btr", x_BTD, a)
        added = jnp.einsum("btr,brf->btf", low, b) * scale
        if none == "result":
            added = jnp.where(used, added, 0)
        added = added / a_NDR.shape[-1] if by_rank else added
        return base + added if weights else added

    return fn


def served(t, B, T, D, F, N, R, which):
    def draw(*shape):
        return jnp.asarray(t.rng.normal(size=shape), jnp.float32)

    a, b = draw(N, D, R) / D**0.5, draw(N, R, F)
    scale = jnp.asarray(t.rng.uniform(0.5, 3, N), jnp.float32)
    return draw(B, T, D), draw(D, F) / D**0.5, a, b, scale, jnp.asarray(which, jnp.int32)


def sizes_in(jaxpr, seen):
    """(primitive, sizes of inputs, sizes of outputs) of a jaxpr and those in it."""
    for equation in jaxpr.eqns:
        both = equation.invars, equation.outvars
        sizes = [[int(np.prod(getattr(v.aval, "shape", ()))) for v in side] for side in both]
        seen.append((equation.primitive.name, *sizes))
        for inner in jaxprs_in_params(equation.params):
            sizes_in(inner, seen)
    return seen


@lora_rows.check("each row its own")
def _(fn, t):
    for B, T, N, R in ((4, 3, 6, 2), (1, 5, 3, 1), (6, 1, 2, 4)):
        args = served(t, B, T, 24, 17, N, R, t.rng.integers(0, N, B))
        t.close(
            fn(*args), lora_rows_with()(*args), 1e-4, 1e-4, f"{B} rows, {N} adapters of rank {R}"
        )


@lora_rows.check("rows without")
def _(fn, t):
    for which in ([-1, 2, -1, 0, 2], [-1, -1, -1, -1, -1]):
        args = served(t, 5, 3, 32, 21, 3, 2, which)
        t.close(fn(*args), lora_rows_with()(*args), 1e-4, 1e-4, f"adapters {which}")


@lora_rows.check("under jit")
def _(fn, t):
    args = served(t, 3, 2, 24, 17, 5, 2, [4, -1, 0])
    t.close(jax.jit(fn)(*args), lora_rows_with()(*args), 1e-4, 1e-4, "which_B is traced")


@lora_rows.check("no array of the size of the weights")
def _(fn, t):
    args = served(t, 3, 4, 96, 80, 40, 4, [7, -1, 31])
    seen = sizes_in(jax.make_jaxpr(fn)(*args).jaxpr, [])
    largest = max((n for _, _, made in seen for n in made), default=0)
    t.true(
        largest < 96 * 80, f"an array of {largest:,} numbers is made; w has {96 * 80:,}", largest
    )


@lora_rows.check("no product of all adapters")
def _(fn, t):
    args = served(t, 3, 4, 96, 80, 40, 4, [7, -1, 31])
    seen = sizes_in(jax.make_jaxpr(fn)(*args).jaxpr, [])
    read = max((n for name, took, _ in seen if name == "dot_general" for n in took), default=0)
    t.true(
        read <= 96 * 80,
        f"a product reads {read:,} numbers; w has {96 * 80:,}, all a {40 * 96 * 4:,}",
        read,
    )


@lora_rows.check("as much work for more adapters")
def _(fn, t):
    counts = []
    for N in (3, 24):
        args = served(t, 3, 4, 32, 21, N, 4, [2, -1, 0])
        seen = sizes_in(jax.make_jaxpr(fn)(*args).jaxpr, [])
        counts.append(sum(name in ("dot_general", "scan", "while") for name, _, _ in seen))
    few, many = counts
    t.true(few == many, f"{few} products and loops for 3 adapters, {many} for 24", many)


@lora_rows.check("freed adapters hold NaN")
def _(fn, t):
    x, w, a, b, scale, which = served(t, 4, 3, 32, 21, 4, 2, [1, -1, 2, 1])
    bad = jnp.array([0, 3])
    a, b, scale = a.at[bad].set(jnp.nan), b.at[bad].set(jnp.inf), scale.at[bad].set(jnp.nan)
    args = (x, w, a, b, scale, which)
    t.close(
        fn(*args),
        lora_rows_with()(*args),
        1e-4,
        1e-4,
        "adapters 0 and 3 are NaN; rows use 1, -1, 2, 1",
    )


def tangents(fn, x, w, a, b, scale, which, g):
    def loss(x, w, a, b):
        return jnp.sum(fn(x, w, a, b, scale, which) * g)

    return jax.grad(loss, (0, 1, 2, 3))(x, w, a, b)


@lora_rows.check("gradients")
def _(fn, t):
    x, w, a, b, scale, which = served(t, 5, 3, 32, 21, 4, 2, [1, -1, 2, 1, -1])
    bad = jnp.array([0, 3])
    for why in ("all adapters are numbers", "adapters 0 and 3 are NaN"):
        g = jnp.asarray(t.rng.normal(size=(5, 3, 21)), jnp.float32)
        args = (x, w, a, b, scale, which, g)
        t.close(
            tangents(fn, *args), tangents(lora_rows_with(), *args), 1e-4, 1e-4, f"gradients, {why}"
        )
        a, b, scale = a.at[bad].set(jnp.nan), b.at[bad].set(jnp.nan), scale.at[bad].set(jnp.nan)


for name, hint, options in (
    ("merged_weights", "You merge each row's adapter into the weights: B copies of w. Multiply x by a first, which "
     "leaves R numbers a token.", {"how": "merged"}),
    ("all_adapters", "You multiply with all N adapters and keep B of them. Pick out the ones you need by their "
     "index first.",
     {"how": "one_hot"}),
    ("loop_over_all", "You go through all N adapters, whoever wants them. Pick out one for each row by its index.",
     {"how": "loop"}),
    ("last_for_none", "In JAX the index -1 picks the last adapter. Rows without an adapter get x w alone.",
     {"none": "ignore"}),
    ("times_zero", "You multiply the adapter's part by 0 where there is none. 0 times NaN is NaN: select with "
     "`jnp.where`.", {"none": "multiply"}),
    ("adapter_0_for_none", "Rows without an adapter take adapter 0 and multiply by 0. If its slot was freed, that is "
     "NaN: select with `jnp.where` before you multiply.", {"none": "clamp"}),
    ("where_at_the_end", "The result is right, but its gradient is NaN: 0 times NaN again, backward. Select before you "
     "multiply, not after.", {"none": "result"}),
    ("no_scale", "Each adapter has a scale.", {"scaled": "one"}),
    ("divided_by_rank", "You divide by R. The scale is all that an adapter's part is multiplied by.",
     {"by_rank": True}),
    ("adapters_alone", "You leave out x w. An adapter's part is added to it.", {"weights": False}),
    ("scale_of_the_row", "You take the scale by the number of the row. Take it by the number of its adapter.",
     {"scaled": "row"}),
    ("adapter_of_the_row", "Row i gets adapter i. Its adapter is `which_B[i]`.", {"how": "row"}),
    ("scale_twice", "You multiply by the scale twice. It counts once, for the product (x a) b.", {"scaled": "twice"}),
    ("scale_of_the_first", "All rows get the scale of adapter 0. Each adapter has its own.", {"scaled": "first"}),
    ("first_for_all", "All rows get the adapter of the first.", {"how": "first"}),
):  # fmt: skip
    mistaken(lora_rows, name, hint, lora_rows_with(**options))


# ----------------------------------------------------------------------------------------- dpo

dpo = Exercise(
    "26.dpo",
    title="A preference becomes a loss",
    function="dpo",
    minutes=25,
    points=15,
    statement="""
Write `dpo(logp_BT, ref_BT, segment_BT, mask_BT, beta)`, the loss of direct preference optimization for packed pairs:
each row has the chosen conversation as segment 1 and the rejected one as segment 2.

- An answer's log-probability is the sum over its targets, those of its segment where `mask_BT` is 1.
- The implicit reward of an answer is beta times the difference between its log-probability and the reference's.
- The loss of a pair is -log σ(reward of the chosen - reward of the rejected). The result is the mean over pairs.
- A row in which one of the answers has no target isn't a pair, and doesn't count; such an answer has the reward 0. With
  no pair at all, the loss is 0.
- Margins may be ±10,000: loss and gradients stay finite and right.
- Where `mask_BT` is 0 the log-probabilities may be anything, even NaN. The gradient there is 0.
- Everything is computed in float32, even for bfloat16 inputs: differences, sums and margins.
""",
    hints=(
        "Work out one row by hand: the change of each target, its sum over each of the two answers, the rewards, the "
        "margin. Which of these does the failing check show? (-log σ(m) is in `jax.nn`, under a name that begins with "
        "soft.)",
        "Which targets belong to answer 1 and which to 2 is a [B, T, 2] array of booleans. Select with `jnp.where`, "
        "and sum over T. A row is a pair if both have a target.",
        "`change = logp.astype(f32) - ref.astype(f32)`, `is_BT2 = (segment[..., None] == jnp.array([1, 2])) & (mask > "
        "0)[..., None]`, `reward_B2 = beta * jnp.where(is_BT2, change[..., None], 0).sum(1)`, and "
        "`jax.nn.softplus(reward_B2[:, 1] - reward_B2[:, 0])` is the loss of a row.",
    ),
)


def dpo_with(
    *, naive=False, mean_tokens=False, reference=True, swapped=False, fixed=None, masked="where",
    rows="pairs", wide=True, total=False, beta_twice=False, scaled=True, sigmoid=True,
    segments=(1, 2), narrow="",
):  # fmt: skip
    def fn(logp_BT, ref_BT, segment_BT, mask_BT, beta):
        kind = jnp.float32 if wide else logp_BT.dtype
        kind = {"all": logp_BT.dtype, "always": jnp.bfloat16}.get(narrow, kind)
        beta = fixed or beta
        change = logp_BT.astype(kind) - ref_BT.astype(kind) * (1 if reference else 0)
        if narrow == "difference":
            change = (logp_BT - ref_BT).astype(jnp.float32)
        if not reference:
            change = logp_BT.astype(kind)
        of = segment_BT[..., None] == jnp.array(segments)
        if masked != "ignored":
            of = of & (mask_BT > 0)[..., None]
        chosen = jnp.where(of, change[..., None], 0)
        if masked == "times":
            chosen = change[..., None] * of.astype(kind)
        if wide:
            sums = chosen.sum(1)
        else:  # added one after another, as bfloat16
            sums = jax.lax.reduce(chosen, jnp.zeros((), kind), jax.lax.add, (1,))
            sums = jax.lax.fori_loop(
                0, chosen.shape[1], lambda i, s: s + chosen[:, i], jnp.zeros_like(sums)
            )
        if mean_tokens:
            sums = sums / jnp.maximum(of.sum(1), 1)
        if narrow == "sums":
            parts = [jnp.where(of, x[..., None], 0).sum(1) for x in (logp_BT, ref_BT)]
            sums = parts[0].astype(jnp.float32) - parts[1].astype(jnp.float32)
        reward = (beta * sums).astype(jnp.float32)
        if narrow == "rewards":
            reward = reward.astype(logp_BT.dtype).astype(jnp.float32)
        margin = reward[:, 0] - reward[:, 1]
        if narrow == "margin":
            margin = margin.astype(logp_BT.dtype).astype(jnp.float32)
        margin = -margin if swapped else margin
        margin = beta * margin if beta_twice else margin
        loss = -jnp.log(jax.nn.sigmoid(margin)) if naive else jax.nn.softplus(-margin)
        loss = {True: loss, False: -margin, "alone": -jax.nn.sigmoid(margin)}[sigmoid]
        reward = reward if scaled else sums.astype(jnp.float32)
        pair = of.any(1).all(-1)
        if rows == "segments":
            pair = (segment_BT[..., None] == jnp.array([1, 2])).any(1).all(-1)
        if rows == "all":
            return loss.mean(), reward
        if rows == "either":
            pair = of.any(1).any(-1)
        if rows == "rejected":
            pair = of.any(1)[:, 1]
        if rows == "divided":
            return jnp.where(pair, loss, 0).mean(), reward
        loss = jnp.where(pair, loss, 0).sum()
        count = pair.sum() if rows == "no_pair" else jnp.maximum(pair.sum(), 1)
        return loss if total else loss / count, reward

    return fn


def packed(t, B, T, *, spread=1.0, missing=(), empty=None):
    """Pairs with prompts of any length, and padding that holds rubbish."""
    segment, mask = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
    for row in range(B):
        at = 0
        for number in (1, 2):
            prompt, answer = (int(n) for n in t.rng.integers(1, T // 4 + 1, 2))
            if (row, number) not in missing:
                segment[row, at : at + prompt + answer] = number
                mask[row, at + prompt : at + prompt + answer] = 1
            at += prompt + answer
    logp = -spread * t.rng.exponential(1.0, (B, T)) + spread * segment.clip(0, 1)
    ref = -spread * t.rng.exponential(1.0, (B, T))
    if empty is not None:
        logp, ref = np.where(mask > 0, logp, empty), np.where(mask > 0, ref, empty)
    logp, ref, mask = (jnp.asarray(x, jnp.float32) for x in (logp, ref, mask))
    return logp, ref, jnp.asarray(segment), mask


def prefers(fn, t, args, beta, why, rtol=1e-4):
    loss, reward = fn(*args, beta)
    want_loss, want = dpo_with()(*args, beta)
    rewards = np.asarray(want)
    told = {
        "The chosen answer's reward comes first": rewards[:, ::-1],
        "You divide by beta instead of multiplying with it": rewards / beta**2,
        "You subtract the answer's log-probability from the reference's": -rewards,
    }
    t.close(reward, want, rtol, 1e-4, f"the rewards, {why}", dtype=np.float32, mistakes=told)
    margin = (rewards[:, 0] - rewards[:, 1]).astype(np.float64)
    told = {  # where every row is a pair
        "You return one loss for each row; want the mean over pairs": np.logaddexp(0, -margin),
        "This is -log σ of the margin without beta": np.logaddexp(0, -margin / beta).mean(),
        "This is log σ: the loss has a minus": -np.logaddexp(0, -margin).mean(),
        "This is σ of the margin, without the logarithm": np.exp(-np.logaddexp(0, -margin)).mean(),
        "This is 1 - σ of the margin, without the logarithm": np.exp(
            -np.logaddexp(0, margin)
        ).mean(),
        "This is -log σ of the mean margin; want the mean of the losses": np.logaddexp(
            0, -margin.mean()
        ),
    }
    t.close(loss, want_loss, rtol, 1e-5, f"the loss, {why}", mistakes=told)


@dpo.check("pairs")
def _(fn, t):
    for B, T, beta in ((5, 24, 0.1), (1, 16, 0.5), (3, 40, 2.0)):
        prefers(fn, t, packed(t, B, T), beta, f"{B} pairs, beta = {beta}")


@dpo.check("far margins")
def _(fn, t):
    for sign in (1, -1):
        for size in (90.0, 10_000.0):
            logp, ref, segment, mask = packed(t, 2, 20)
            count = (mask * (segment == 1)).sum(1, keepdims=True)
            logp = ref + sign * size * (segment == 1) * mask / count
            args = logp, ref, segment, mask
            prefers(fn, t, args, 1.0, f"a margin of {sign * size:g}")
            got = jax.grad(lambda x, a=args: fn(x, *a[1:], 1.0)[0])(logp)
            want = jax.grad(lambda x, a=args: dpo_with()(x, *a[1:], 1.0)[0])(logp)
            t.close(got, want, 1e-4, 1e-6, f"the gradient at a margin of {sign * size:g}")


@dpo.check("what isn't an answer")
def _(fn, t):
    # On CPUs XLA turns a product with a converted bool into a choice, which hides that 0 times NaN is NaN.
    options = {"xla_disable_hlo_passes": "algsimp"}
    as_written = jax.jit(lambda *args: fn(*args, 0.3), compiler_options=options)
    gradient = jax.jit(jax.grad(lambda *args: fn(*args, 0.3)[0]), compiler_options=options)
    for rubbish in (-1e4, -np.inf, np.nan):
        args = packed(t, 4, 24, empty=rubbish)
        why = f"log-probabilities outside of answers are {rubbish}"
        prefers(lambda *args: as_written(*args[:-1]), t, args, 0.3, why)
        got = gradient(*args)
        want = jax.grad(lambda x, a=args: dpo_with()(x, *a[1:], 0.3)[0])(args[0])
        t.close(got, want, 1e-4, 1e-6, f"the gradient, where the rest is {rubbish}")


@dpo.check("rows that are no pairs")
def _(fn, t):
    missing = ((0, 1), (2, 2), (3, 1), (3, 2))
    prefers(fn, t, packed(t, 6, 24, missing=missing), 0.7, "rows 0, 2 and 3 of 6 lack an answer")
    logp, ref, segment, mask = packed(t, 4, 24)
    mask = mask.at[1].set(mask[1] * (segment[1] != 2))
    prefers(fn, t, (logp, ref, segment, mask), 0.7, "in row 1 of 4, segment 2 has a prompt alone")
    missing = tuple((row, 2) for row in range(3))
    prefers(fn, t, packed(t, 3, 16, missing=missing), 0.7, "no row has both answers")


def narrow_steps(fn, *args):
    """What a program computes, or rounds, to bfloat16, as the end of a sentence for the learner."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            kinds = [str(v.aval.dtype) for v in (*equation.invars[:1], *equation.outvars[:1])]
            name = equation.primitive.name
            if name in ROUNDING and kinds[-1] == "bfloat16":
                yield name
            if name == "convert_element_type" and kinds == ["float32", "bfloat16"]:
                yield "a conversion to bfloat16"
            for inner in jaxprs_in_params(equation.params):
                yield from walk(inner)

    names = sorted(set(walk(jax.make_jaxpr(fn)(*args).jaxpr)))
    return f". Your program rounds to bfloat16: {', '.join(names)}" if names else ""


ROUNDING = {
    "add",
    "sub",
    "mul",
    "div",
    "reduce_sum",
    "cumsum",
    "dot_general",
    "log1p",
    "exp",
    "log",
}


@dpo.check("bfloat16")
def _(fn, t):
    logp, ref, segment, mask = packed(t, 3, 1200)
    half = [x.astype(jnp.bfloat16) for x in (logp, ref)]
    args = (*half, segment, mask)
    why = "sums of hundreds of bfloat16 numbers" + narrow_steps(fn, *args, 0.1)
    prefers(fn, t, args, 0.1, why, 1e-3)


@dpo.check("bfloat16, with a difference that is small beside the numbers")
def _(fn, t):
    B, T = 3, 600
    _, _, segment, mask = packed(t, B, T)
    # Two neighbours are -a, -b and -b, -c. Their differences are nearly b, and those of their sums
    # are c - a. In float32 all of this is exact; in bfloat16 16 - c is 16.
    a, c = (np.repeat(t.rng.integers(*x, (B, T // 2)), 2, 1) / 2**12 for x in ((8, 64), (64, 120)))
    b = np.repeat(t.rng.integers(128, 160, (B, T // 2)), 2, 1) / 8
    first = np.arange(T) % 2 == 0
    logp, ref = np.where(first, -a, -b), np.where(first, -b, -c)
    flip = np.asarray(segment) == t.rng.integers(1, 3, (B, 1))
    logp, ref = np.where(flip, ref, logp), np.where(flip, logp, ref)
    for number in (1, 2):  # whole pairs of neighbours only
        of = (np.asarray(mask) > 0) & (np.asarray(segment) == number)
        for row in range(B):
            where = np.flatnonzero(of[row])
            odd = [i for i in where if i ^ 1 not in where]
            logp[row, odd] = ref[row, odd] = -1
    half = [jnp.asarray(x, jnp.bfloat16) for x in (logp, ref)]
    args = (*half, segment, mask)
    why = "differences that are exact in float32 and not in bfloat16" + narrow_steps(fn, *args, 0.5)
    prefers(fn, t, args, 0.5, why, 1e-5)


for name, hint, options in (
    ("log_of_sigmoid", "σ of a far margin is 0, and its logarithm isn't finite. `jax.nn.softplus` or "
     "`jax.nn.log_sigmoid` is.", {"naive": True}),
    ("mean_of_tokens", "An answer's log-probability is the sum over its tokens. You took their mean, which is what "
     "SimPO does.", {"mean_tokens": True}),
    ("no_reference", "The reference is missing: without it any answer that is likely anyway gets a reward.",
     {"reference": False}),
    ("rejected_first", "Segment 1 is the chosen one. Your loss falls when the rejected answer gains.",
     {"swapped": True}),
    ("beta_fixed", "You use a beta of 0.1, whatever is asked for.", {"fixed": 0.1}),
    ("rewards_without_beta", "The rewards that you return lack beta.", {"scaled": False}),
    ("margin_alone", "The loss of a pair is -log σ of the margin. Yours is the margin with a minus.",
     {"sigmoid": False}),
    ("sigmoid_alone", "Your loss is -σ of the margin. It lacks the logarithm: the loss is -log σ.",
     {"sigmoid": "alone"}),
    ("segments_from_0", "The chosen conversation is segment 1, and the rejected one is segment 2. Segment 0 is "
     "padding.", {"segments": (0, 1)}),
    ("beta_twice", "beta is already in the rewards. You multiply their margin by it once more.", {"beta_twice": True}),
    ("prompt_too", "You sum over the prompts, too. mask_BT says which targets are an answer's.", {"masked": "ignored"}),
    ("times_mask", "You multiply by the mask. 0 times NaN or infinity is NaN: select with `jnp.where`.",
     {"masked": "times"}),
    ("either_answer", "You count a row that has either answer. A pair has both.", {"rows": "either"}),
    ("one_answer", "You check only for the rejected answer. A row that has nothing else isn't a pair.",
     {"rows": "rejected"}),
    ("by_segments", "You ask whether a row has both segments. A segment may be a prompt without an answer.",
     {"rows": "segments"}),
    ("all_rows", "You count rows that lack an answer. They aren't pairs.", {"rows": "all"}),
    ("divided_by_rows", "You divide by all rows. Divide by those that are pairs.", {"rows": "divided"}),
    ("zero_over_zero", "With no pair at all you divide 0 by 0.", {"rows": "no_pair"}),
    ("summed", "The loss is the mean over pairs, not their sum.", {"total": True}),
    ("narrow_sums", "You add up in bfloat16: beyond 256 it doesn't even change when 1 is added.", {"wide": False}),
    ("narrow_difference", "You subtract bfloat16 numbers, so each difference is rounded to 8 bits before it is added "
     "up. Convert both to float32 first.", {"narrow": "difference"}),
    ("narrow_results", "The sum of bfloat16 numbers is a bfloat16 number again: it is rounded to 8 bits, and the "
     "difference of two such sums has lost what counts. Convert to float32 before you add up.", {"narrow": "sums"}),
    ("narrow_rewards", "You round the rewards to bfloat16. Convert the log-probabilities to float32 at the beginning, "
     "and nothing back.", {"narrow": "rewards"}),
    ("narrow_margin", "You round the margin to bfloat16. Convert the log-probabilities to float32 at the beginning, "
     "and nothing back.", {"narrow": "margin"}),
    ("narrow_all", "You compute in bfloat16, with 8 bits. Convert the log-probabilities to float32 at the beginning.",
     {"narrow": "all"}),
    ("always_narrow", "You compute in bfloat16, even where the log-probabilities are float32. Convert to float32 at "
     "the beginning.", {"narrow": "always"}),
):  # fmt: skip
    mistaken(dpo, name, hint, dpo_with(**options))


# --------------------------------------------------------------------------- group_advantages

advantages = Exercise(
    "26.group_advantages",
    title="Better than the rest of its group",
    function="group_advantages",
    minutes=25,
    points=15,
    statement="""
Write `group_advantages(reward_N, group_N, mask_NT, scaled, mean)`, the part of GRPO that runs on the host, in NumPy.
Rollouts with the same number in `group_N` answer the same prompt.

- A rollout's advantage is its reward minus the mean reward of its group. With `scaled=True` it is divided by the
  standard deviation of the group, that of a sample: the sum of squares is divided by one less than the number of
  rewards. Don't add an epsilon to it. Dr. GRPO has `scaled=False`.
- In a group whose rewards are all equal every advantage is *exactly* 0. Groups may have any size, including 1.
- The loss is going to be the sum of `weight_NT` times the loss of each token, where the weights say how tokens count.
  All tokens where the mask is 0 weigh 0. The others:
  - `"sequence"` (GRPO): the mean over rollouts of the mean over their tokens. Rollouts without any token don't count.
  - `"token"` (DAPO): the mean over all tokens.
  - `"constant"` (Dr. GRPO): the sum over tokens, divided by N T, whatever their number.
- If no rollout has a token, all weights are 0.
""",
    hints=(
        "`np.unique(group_N)` gives the groups. How do you find out that all rewards of a group are equal, without "
        "trusting that (0.1 + 0.1 + 0.1) / 3 is 0.1?",
        "All are equal if the smallest is the largest. The weights are the mask times a number for each rollout: what "
        "is it in each of the three cases?",
        "With `length = mask.sum(1)`: `1 / length / (number of rollouts with tokens)`, `1 / length.sum()`, and "
        "`1 / mask.size`; with `max(..., 1)` where there may be none.",
    ),
)


def advantages_with(
    *, ddof=1, equal="exact", by="group", scaled=None, mean=None, empty="skip", loo=False, all_n=False,
    padding=True, constant="size", added=0.0, groups=False, deviation="group",
):  # fmt: skip
    def fn(reward_N, group_N, mask_NT, is_scaled, how):
        is_scaled = is_scaled if scaled is None else scaled
        how = how if mean is None else mean
        reward_N = reward_N.astype(np.float32 if equal == "float32" else np.float64)
        out = np.zeros(len(reward_N))
        names = np.unique(group_N)
        rows = np.arange(len(reward_N))
        for n, group in enumerate(names):
            of = group_N == group
            if by == "reshape":
                of = np.arange(len(rows)).reshape(len(names), -1)[n]
            elif by == "blocks":
                size = -(-len(rows) // len(names))
                of = rows // size == n
            elif by == "all":
                of = np.ones(len(rows), bool)
            elif by == "absolute":
                of = np.abs(group_N) == abs(group)
            r = reward_N[of]
            if len(r) == 0:
                continue
            if r.max() - r.min() <= {"exact": 0.0, "near": 1e-3}.get(equal, -1.0):
                continue
            with np.errstate(all="ignore"):
                over = reward_N if deviation == "all" else r
                divisor = over.std(ddof=min(ddof, len(over) - 1)) + added if is_scaled else 1.0
                if equal == "float32":
                    divisor = divisor + 1e-8 if is_scaled else 1.0
                    out[of] = (r - np.sum(r) * np.float32(1 / len(r))) / divisor
                else:
                    centre = (r.sum() - r) / max(len(r) - 1, 1) if loo else r.mean()
                    out[of] = (r - centre) / divisor
        mask = (mask_NT > 0).astype(np.float64)
        length = mask.sum(1)
        with np.errstate(all="ignore"):
            if how == "token":
                share = np.full(len(length), 1 / max(length.sum(), 1))
            elif how == "sequence":
                count = len(length) if all_n else max(np.sum(length > 0), 1)
                share = 1 / (np.maximum(length, 1) if empty == "skip" else length) / count
                if groups:
                    share = share * 0 + 1 / np.maximum(length, 1)
            else:
                divisor = {"size": mask.size, "longest": len(length) * max(length.max(), 1), "T": mask.shape[1],
                           "one": 1}[constant]  # fmt: skip
                share = np.full(len(length), 1 / divisor)
            weight = (mask if padding else np.ones_like(mask)) * share[:, None]
        return out.astype(np.float32), weight.astype(np.float32)

    return fn


def rollouts(t, sizes, T=9, empty=(), rewards=None):
    names = t.rng.choice(np.arange(1, 1000), len(sizes), replace=False)
    names[0] = -names[-1]  # two groups whose numbers differ in their sign alone
    group = t.rng.permutation(np.repeat(names, sizes))
    N = len(group)
    reward = (
        t.rng.normal(size=N)
        if rewards is None
        else np.asarray(rewards)[np.searchsorted(np.sort(names), group)]
    )
    length = t.rng.integers(1, T, N)  # the last token is nobody's
    length[list(empty)] = 0
    mask = (np.arange(T) < length[:, None]).astype(np.float32)
    return reward.astype(np.float32), group, mask


def spans_of(reward, group):
    """The largest less the smallest reward of each rollout's group."""
    return np.array([np.ptp(reward[group == g]) for g in group])


def middles(reward, group):
    """The mean less the median of each rollout's group."""
    groups = [reward[group == g] for g in group]
    return np.array([np.mean(r) - np.median(r) for r in groups])


def estimates(fn, t, args, scaled, mean, why):
    got = fn(*(x.copy() for x in args), scaled, mean)
    want = advantages_with()(*args, scaled, mean)
    said = f"{why}, scaled={scaled}, mean={mean!r}"
    (reward, group, _), (centred, _) = args, advantages_with()(*args, False, mean)
    by_order = advantages_with(by="blocks")(*args, scaled, mean)[0]
    with np.errstate(all="ignore"):
        sizes = np.array([np.sum(group == g) for g in group])
        told = {
            "You divide by the standard deviation of all rewards: each group has its own": centred
            / reward.std(ddof=1),
            "You divide by the standard deviation of all rewards, not of a group": centred
            / reward.std(),
            "You divide by the variance, not by its root": np.where(
                centred == 0, 0, want[0] ** 2 / centred
            ),
            "You divide by the standard error: that of the mean is smaller": want[0]
            * np.sqrt(sizes),
            "You leave out the standard deviation": centred,
            "You divide by the group's range, not by its standard deviation": centred
            / spans_of(reward, group),
            "You subtract the group's median, not its mean": want[0]
            + middles(reward, group) * want[0] / centred,
            "You don't subtract the group's mean": reward,
            "You treat neighbours as a group": by_order,
            "They come sorted by group, but each belongs where its rollout is": want[0][
                np.argsort(group, kind="stable")
            ],
        }
    t.close(got[0], want[0], 1e-4, 1e-5, f"advantages, {said}", dtype=np.float32, mistakes=told)
    mask = (args[2] > 0).astype(float)
    length = np.maximum(mask.sum(1, keepdims=True), 1)
    counted = max(int((mask.sum(1) > 0).sum()), 1)
    told = {
        "These are the means over each rollout's tokens, summed": mask / length,
        "These are the mask": mask,
        "You divide by the number of tokens of the longest answer": mask / length.max(),
        "You divide by the number of rollouts that have tokens": mask / counted,
        "You divide by N": mask / len(mask),
        "You divide by T": mask / mask.shape[1],
        "You divide by N T": mask / mask.size,
        "This is the mean over all tokens": mask / max(mask.sum(), 1),
        "This is the mean over rollouts of the mean over their tokens": mask / length / counted,
        "Rollouts without tokens don't count": mask / length / len(mask),
        "The tokens are multiplied by their advantage already": want[0][:, None] * want[1],
    }
    t.close(got[1], want[1], 1e-5, 1e-8, f"weights, {said}", dtype=np.float32, mistakes=told)


@advantages.check("groups of one size")
def _(fn, t):
    for scaled in (True, False):
        estimates(fn, t, rollouts(t, (4, 4, 4)), scaled, "token", "three groups of 4, in any order")


@advantages.check("groups of several sizes")
def _(fn, t):
    for scaled in (True, False):
        estimates(fn, t, rollouts(t, (5, 2, 7, 3)), scaled, "token", "groups of 5, 2, 7 and 3")


@advantages.check("equal rewards")
def _(fn, t):
    for value in (0.1, 0.7, 1 / 3, float(t.rng.uniform(0, 1))):
        sizes = (3, 5, 6, 7, 11, 13)
        rewards = np.full(len(sizes), value, np.float32)
        args = rollouts(t, sizes, rewards=rewards)
        for scaled in (True, False):
            got = np.asarray(fn(*(x.copy() for x in args), scaled, "token")[0], np.float32)
            told = f"all rewards are {value:.3g}, scaled={scaled}"
            if got.any() and np.isfinite(got).all():
                told += "; the computed mean of equal numbers may differ from them by rounding"
                told += " and the standard deviation isn't 0 either" if scaled else ""
            t.equal(got, np.zeros(sum(sizes), np.float32), told)


@advantages.check("rewards that differ little")
def _(fn, t):
    reward, group, mask = rollouts(t, (4, 5, 3))
    args = reward * np.float32(1e-5), group, mask
    estimates(fn, t, args, True, "token", "rewards that differ by some hundred-thousandths")


@advantages.check("a group of one")
def _(fn, t):
    for scaled in (True, False):
        estimates(fn, t, rollouts(t, (1, 4, 1, 2)), scaled, "token", "groups of 1, 4, 1 and 2")


@advantages.check("a mean over sequences, tokens, or neither")
def _(fn, t):
    for mean in ("sequence", "constant", "token"):
        estimates(fn, t, rollouts(t, (3, 4)), False, mean, "answers of several lengths")


@advantages.check("rollouts without tokens")
def _(fn, t):
    for mean in ("sequence", "constant", "token"):
        args = rollouts(t, (3, 4), empty=(0, 5))
        estimates(fn, t, args, True, mean, "rollouts 0 and 5 have no token")
        args = rollouts(t, (2, 2), empty=range(4))
        estimates(fn, t, args, False, mean, "no rollout has a token")


for name, hint, options in (
    ("by_number", "`np.std` divides the squares by their number. The sample's standard deviation divides by one "
     "less: `ddof=1`.",
     {"ddof": 0}),
    ("tiny_noise", "Where all rewards are equal, their mean differs from them by rounding, and the standard deviation "
     "is as tiny: their ratio isn't 0. Ask whether the smallest is the largest.", {"equal": "float32"}),
    ("near", "You treat rewards that differ only a little as equal. Zero is for rewards that don't differ at all.",
     {"equal": "near"}),
    ("sign_of_the_group", "Groups g and -g are two groups. You throw them together.", {"by": "absolute"}),
    ("nan", "In a group of equal rewards you divide 0 by 0.", {"equal": "nan"}),
    ("one_mean", "You compare with the mean of all rollouts. Each group has its own.", {"by": "all"}),
    ("neighbours", "You treat neighbours as a group. group_N says who belongs together, in any order.",
     {"by": "blocks"}),
    ("always_scaled", "With scaled=False nothing is divided by the standard deviation.", {"scaled": True}),
    ("without_itself", "You compare with the mean of the *others*. It's the mean of the whole group.", {"loo": True}),
    ("token_for_sequence", "You take the mean over all tokens, whatever the argument `mean` says.", {"mean": "token"}),
    ("constant_for_all", "You divide by N T, whatever the argument `mean` says.", {"mean": "constant"}),
    ("sequence_for_all", "You take the mean over rollouts, whatever the argument `mean` says.", {"mean": "sequence"}),
    ("empty_nan", "A rollout without tokens gives 0 / 0.", {"empty": "nan"}),
    ("empty_counts", "Rollouts without tokens don't count: divide by the number of those that have some.",
     {"all_n": True}),
    ("padding_weighs", "Tokens where the mask is 0 weigh 0.", {"padding": False}),
    ("epsilon", "You add a small number to the standard deviation. Where rewards differ little it isn't small.",
     {"added": 1e-4}),
    ("sum_of_means", "`sequence` is a mean over rollouts. You take the sum of their means.", {"groups": True}),
    ("rows_of_one_length", "You reshape rewards to one row for each group, as if those of a group were neighbours. "
     "group_N says who belongs together, in any order.", {"by": "reshape"}),
    ("deviation_of_all", "You divide by the standard deviation of all rewards. Each group has its own.",
     {"deviation": "all"}),
    ("constant_one", "`constant` divides by N T. You don't divide at all.", {"constant": "one"}),
    ("constant_t", "`constant` divides by N T. You divide by T alone.", {"constant": "T"}),
    ("longest", "The constant is T, the width of the mask. Yours depends on the longest answer.",
     {"constant": "longest"}),
):  # fmt: skip
    mistaken(advantages, name, hint, advantages_with(**options))


# -------------------------------------------------------------------------------------- clipped

clipped = Exercise(
    "26.clipped",
    title="A step that doesn't go too far",
    function="clipped",
    minutes=25,
    points=15,
    statement="""
Write `clipped(logp_BT, old_BT, ref_BT, advantage_BT, mask_BT, low, high, kl)`, the loss of each token in PPO and GRPO.

- The ratio r is exp(logp - old). The gain is the smaller of r A and clip(r, 1 - low, 1 + high) A, with the advantage A.
- The distance from the reference is exp(d) - d - 1 with d = ref - logp (Schulman's k3, an estimate of the KL
  divergence that is never negative).
- The loss of a token is kl times the distance, minus the gain.
- Both differences of log-probabilities are first clipped to between -20 and 20, so nothing overflows.
- Where `mask_BT` is 0 the loss is 0 and so is the gradient, and the other arrays may hold anything there, even NaN.
""",
    hints=(
        "For which ratios is the smaller of the two the clipped one, if A is positive? If A is negative? Draw both. "
        "`jnp.minimum` does the right thing in both cases if you multiply by A inside it.",
        "A NaN that `jnp.where` throws away forward comes back in the gradient: 0 times NaN. Select before you "
        "compute anything from the masked values, so that only zeros go in.",
        "`difference = lambda x, y: jnp.clip(jnp.where(drawn, x - y, 0), -20, 20)` for both differences, the advantage "
        "selected the same way; then the three formulas. With zeros everywhere the loss of a token is 0 by itself.",
    ),
)


def clipped_with(
    *, bounds="both", best="minimum", estimate="k3", masked="before", limit=20.0, old=True, kl_is=None,
    reverse=False, sign=1, pulls=True, inverted=False, kl_of_all=False, limits="both",
    attracts=False, from_ref=True, held=False,
):  # fmt: skip
    def fn(logp, old_, ref, advantage, mask, low, high, kl):
        drawn = mask > 0
        kl = kl if kl_is is None else kl_is
        pick = (lambda x: jnp.where(drawn, x, 0)) if masked == "before" else (lambda x: x)
        limited = (lambda x: jnp.clip(x, -limit, limit)) if limit else (lambda x: x)
        old_ = old_ if old else jax.lax.stop_gradient(logp)
        change = pick(old_ - logp if inverted else logp - old_)
        change = jax.lax.stop_gradient(change) if held else change
        ratio = jnp.exp(change if limits == "distance" else limited(change))
        advantage = pick(advantage)
        low, high = {"low": (low, low), "high": (high, high), "low alone": (1 - low, high)}.get(
            bounds, (low, high)
        )
        inside = jnp.clip(ratio, 1 - low, 1 + high)
        inside = jnp.clip(ratio, low, high) if bounds == "as given" else inside
        if best == "minimum":
            gain = jnp.minimum(ratio * advantage, inside * advantage)
        elif best == "maximum":
            gain = jnp.maximum(ratio * advantage, inside * advantage)
        elif best == "ratio":
            gain = jnp.minimum(ratio, inside) * advantage
        else:
            gain = (inside if best == "clipped" else ratio) * advantage
        d = pick(logp - ref if reverse else (ref if from_ref else old_) - logp)
        d = d if limits == "ratio" else limited(d)
        far = {"k3": jnp.exp(d) - d - 1, "k3 + 1": jnp.exp(d) - d, "k2": d**2 / 2, "k1": -d}[
            estimate
        ]
        loss = kl * (far if pulls else jax.lax.stop_gradient(far)) - sign * gain
        loss = kl * (far - gain) if kl_of_all else loss
        loss = loss - 2 * kl * far if attracts else loss
        if masked == "times":
            loss = loss * mask
        elif masked == "after":
            loss = jnp.where(drawn, loss, 0)
        return loss

    return fn


def drawn(t, B, T, *, spread=0.3, empty=None):
    logp, old, ref = (-t.rng.exponential(1.0, (B, T)) for _ in range(3))
    old, ref = logp + spread * t.rng.normal(size=(B, T)), logp + spread * t.rng.normal(size=(B, T))
    advantage = t.rng.normal(size=(B, T))
    advantage[0, 0], advantage[-1, -1] = 1.5, -1.5
    mask = (t.rng.random((B, T)) < 0.7).astype(np.float32)
    mask[0, 0] = mask[-1, -1] = 1
    if empty is not None:
        logp, old, ref, advantage = (
            np.where(mask > 0, x, empty) for x in (logp, old, ref, advantage)
        )
    return [jnp.asarray(x, jnp.float32) for x in (logp, old, ref, advantage, mask)]


def surrogate(fn, t, args, limits, why, gradient=True):
    t.close(fn(*args, *limits), clipped_with()(*args, *limits), 1e-4, 1e-5, f"the loss, {why}")
    if gradient:
        got, want = (
            jax.grad(lambda x, f=f: jnp.sum(f(x, *args[1:], *limits)))(args[0])
            for f in (fn, clipped_with())
        )
        t.close(got, want, 1e-4, 1e-5, f"the gradient, {why}")


@clipped.check("ratios that are not clipped")
def _(fn, t):
    args = drawn(t, 3, 7, spread=0.02)
    args[4] = jnp.ones_like(args[4])
    surrogate(fn, t, args, (0.3, 0.4, 0.0), "ratios near 1", gradient=False)
    surrogate(fn, t, args, (0.3, 0.4, 0.0), "ratios near 1")


@clipped.check("four corners")
def _(fn, t):
    for ratio in (0.4, 2.5):
        for sign in (1.0, -1.0):
            one = jnp.ones((1, 3))
            a = jnp.asarray(sign * t.rng.uniform(0.5, 2, (1, 3)), jnp.float32)
            args = [one * np.log(ratio) - 1, -one, one * np.log(ratio) - 1, a, one]
            surrogate(fn, t, args, (0.2, 0.3, 0.0), f"ratio {ratio}, advantage {sign:+.0f}")


@clipped.check("low and high differ")
def _(fn, t):
    for low, high in ((0.1, 0.5), (0.4, 0.15)):
        args = drawn(t, 4, 9, spread=0.6)
        surrogate(fn, t, args, (low, high, 0.0), f"low = {low}, high = {high}")


@clipped.check("the distance from the reference")
def _(fn, t):
    for kl in (1.0, 0.05):
        args = drawn(t, 4, 6, spread=0.8)
        args[3] = jnp.zeros_like(args[3])
        surrogate(fn, t, args, (0.2, 0.2, kl), f"advantages of 0, kl = {kl}")
    surrogate(fn, t, drawn(t, 3, 5), (0.2, 0.3, 0.4), "advantages and kl = 0.4")


@clipped.check("what wasn't drawn")
def _(fn, t):
    for rubbish in (0.7, -np.inf, np.nan):
        args = drawn(t, 3, 8, empty=rubbish)
        surrogate(fn, t, args, (0.2, 0.3, 0.1), f"everything that wasn't drawn is {rubbish}")


@clipped.check("far apart")
def _(fn, t):
    for far in (15.0, 90.0):
        args = drawn(t, 2, 6)
        away = far * jnp.asarray(t.rng.choice([-1.0, 1.0], (2, 2, 6)), jnp.float32)
        args[1], args[2] = args[0] + away[0], args[0] + away[1]
        surrogate(fn, t, args, (0.2, 0.3, 0.01), f"log-probabilities that differ by {far:g}")


for name, hint, options in (
    ("one_bound", "You clip at 1 - low and 1 + low. The upper bound is 1 + high.", {"bounds": "low"}),
    ("other_bound", "You clip at 1 - high. The lower bound is 1 - low.", {"bounds": "high"}),
    ("larger", "You take the larger of the two: then nothing holds a step back. It's the smaller.",
     {"best": "maximum"}),
    ("always_clipped", "You always use the clipped ratio. A bad token that has become more likely must still be pushed "
     "back: the smaller of the two does that.", {"best": "clipped"}),
    ("ratio_first", "You take the smaller *ratio* and multiply by A afterwards. With a negative A that is the larger "
     "gain.", {"best": "ratio"}),
    ("never_clipped", "Nothing is clipped.", {"best": "none"}),
    ("k1", "logp - ref is right on average, but it's negative for half of the tokens. The distance is "
     "exp(d) - d - 1.", {"estimate": "k1"}),
    ("k2", "Half the square of d is only near exp(d) - d - 1.", {"estimate": "k2"}),
    ("reversed", "d is ref - logp. You have it the other way round.", {"reverse": True}),
    ("distance_from_old", "You measure the distance from old. It's the reference that the model shouldn't leave.",
     {"from_ref": False}),
    ("no_gradient_of_the_ratio", "No gradient flows through the ratio, so it learns nothing from the advantages. "
     "Only what isn't `logp` is a constant.", {"held": True}),
    ("ratio_upside_down", "The ratio is exp(logp - old). You have it upside down.", {"inverted": True}),
    ("kl_times_all", "kl multiplies the distance alone. You multiply the gain by it, too.", {"kl_of_all": True}),
    ("no_kl", "kl times the distance is missing.", {"kl_is": 0.0}),
    ("pulls_nowhere", "The distance is in the loss, but no gradient flows through it: it doesn't hold the model back.",
     {"pulls": False}),
    ("not_negative", "Training lowers a loss, but you want the gain to grow: put a minus in front of it.",
     {"sign": -1}),
    ("own_ratio", "Your ratio is always 1: it divides by today's probability instead of the one with which the "
     "token was drawn.", {"old": False}),
    ("not_masked", "Where the mask is 0 the loss must be 0.", {"masked": "not"}),
    ("times_mask", "You multiply by the mask. 0 times NaN is NaN: select with `jnp.where`.", {"masked": "times"}),
    ("where_at_the_end", "The loss is right, and the gradient is NaN. A NaN that `jnp.where` throws away at the end "
     "comes back in the backward pass, as 0 times NaN: select before you compute.", {"masked": "after"}),
    ("overflows", "exp of 90 is infinite in float32. Clip both differences of log-probabilities first.",
     {"limit": None}),
    ("one_too_many", "Your distance is 1 where nothing has changed. It's exp(d) - d - 1.", {"estimate": "k3 + 1"}),
    ("clipped_at_low", "You clip the ratio at low. The lower bound is 1 - low.", {"bounds": "low alone"}),
    ("clipped_as_given", "You clip the ratio at low and high. The bounds are 1 - low and 1 + high.",
     {"bounds": "as given"}),
    ("rewards_the_distance", "Your loss falls when the distance from the reference grows. It's added to the loss.",
     {"attracts": True}),
    ("limits_the_ratio_alone",
     "exp of 90 is infinite in float32. Clip both differences of log-probabilities first.", {"limits": "ratio"}),
    ("limits_the_distance_alone", "You clip ref - logp to -20 to 20, but not logp - old.", {"limits": "distance"}),
):  # fmt: skip
    mistaken(clipped, name, hint, clipped_with(**options))


# ------------------------------------------------------------------------------------------ gae

gae = Exercise(
    "26.gae",
    title="Credit that flows backward",
    function="gae",
    minutes=25,
    points=15,
    statement="""
Write `gae(reward_BT, value_BT, mask_BT, last_B, discount, decay)`: PPO's advantages, by generalized advantage
estimation.

- The steps of a row are its tokens where `mask_BT` is 1, in their order. There may be tokens in between that the model
  didn't draw (a tool's answer); they are skipped as if they weren't there.
- A step's error is reward + discount * (value of the *next* step) - (value of this step). After the last step the value
  is `last_B`.
- A step's advantage is its error + discount * decay * (advantage of the next step), 0 after the last one.
- A step's return is its advantage + its value.
- Where the mask is 0, both results are 0 and the inputs may hold anything, even NaN.
""",
    hints=(
        "Go through the tokens from the last to the first. Which two numbers do you have to remember from the step "
        "that you have just left?",
        "Remember its advantage and its value. A token with mask 0 leaves both as they are. `jax.lax.scan` has "
        "`reverse=True`; a loop over T works too.",
        "`error = reward + discount * next_value - value`, `new = error + discount * decay * next_advantage`; then "
        "`next_advantage = where(drawn, new, next_advantage)` and `next_value = where(drawn, value, next_value)`.",
    ),
)


def gae_with(
    *, holes="skip", last=True, decays="both", returns="advantage", forward=False, next_step="next",
    masked="where", start="zero", whitened=False, minus=True,
):  # fmt: skip
    def fn(reward, value, mask, last_B, discount, decay):
        reward, value, mask = (np.asarray(x, np.float64) for x in (reward, value, mask))
        B, T = reward.shape
        on = mask > 0
        factor = {"both": discount * decay, "decay": decay, "discount": discount, "one": 1.0}[
            decays
        ]
        advantage = np.zeros((B, T))
        after = np.asarray(last_B, np.float64) if last else np.zeros(B)
        later = np.zeros(B) if start == "zero" else after.copy()
        for i in range(T) if forward else reversed(range(T)):
            error = (
                reward[:, i]
                + (discount if next_step != "undiscounted" else 1) * after
                - value[:, i]
            )
            if next_step == "same":
                error = reward[:, i] - value[:, i]
            error = error if minus else error + value[:, i]
            new = error + factor * later
            if masked == "times":
                m = mask[:, i]
                with np.errstate(all="ignore"):
                    later, after = new * m + later * (1 - m), value[:, i] * m + after * (1 - m)
                advantage[:, i] = later * m
                continue
            if holes == "skip":
                later = np.where(on[:, i], new, later)
                after = np.where(on[:, i], value[:, i], after)
            elif holes == "reset":
                later = np.where(on[:, i], new, 0)
                after = np.where(on[:, i], value[:, i], 0 if on[:, i:].any() else after)
            elif holes == "no value":
                later = np.where(on[:, i], new, later)
                after = np.where(on[:, i], value[:, i], np.where(on[:, i:].any(1), 0, after))
            elif holes == "worthless":
                done = on[:, i:].any(1) & ~on[:, i]
                later = np.where(on[:, i], new, np.where(done, factor * later, later))
                after = np.where(on[:, i], value[:, i], np.where(done, 0, after))
            advantage[:, i] = np.where(on[:, i], later, 0)
        if whitened and on.any():
            centred = advantage - advantage[on].mean()
            advantage = np.where(on, centred / (advantage[on].std() + 1e-8), 0)
        if returns == "advantage":
            back = np.where(on, advantage + np.where(on, value, 0), 0)
        elif returns == "rewards":
            back, total = np.zeros((B, T)), np.zeros(B)
            for i in reversed(range(T)):
                total = np.where(on[:, i], reward[:, i] + discount * total, total)
                back[:, i] = np.where(on[:, i], total, 0)
        elif returns == "error":
            back = advantage
        if masked == "times":
            with np.errstate(all="ignore"):
                back = (advantage + value) * mask
        return jnp.asarray(advantage, jnp.float32), jnp.asarray(back, jnp.float32)

    return fn


def episodes(t, B, T, *, holes=False, cut=True, empty=0.0):
    prompt, length = t.rng.integers(0, T // 3 + 1, B), t.rng.integers(2, T // 2 + 1, B)
    at = np.arange(T)
    mask = (at >= prompt[:, None]) & (at < (prompt + length)[:, None])
    if holes:
        mask &= t.rng.random((B, T)) < 0.6
        mask[0, :3] = [True, False, True]
    reward, value = t.rng.normal(size=(B, T)), t.rng.normal(0.5, 1, (B, T))
    reward, value = (np.where(mask, x, empty) for x in (reward, value))
    last = t.rng.normal(1, 1, B) if cut else np.zeros(B)
    return [jnp.asarray(x, jnp.float32) for x in (reward, value, mask, last)]


def next_column(reward, value, mask, last_B, discount, decay):
    """The advantages if the next step's value is always that of the next column."""
    reward, value, mask = (np.asarray(x, np.float64) for x in (reward, value, mask))
    after = np.concatenate([value[:, 1:], np.asarray(last_B, np.float64)[:, None]], 1)
    error, later, columns = reward + discount * after - value, np.zeros(len(reward)), []
    for i in reversed(range(reward.shape[1])):
        later = np.where(mask[:, i] > 0, error[:, i] + discount * decay * later, 0)
        columns.append(later)
    return np.stack(columns[::-1], 1)


@np.errstate(all="ignore")  # what wasn't drawn may be infinite
def credits(fn, t, args, discount, decay, why):
    got, want = fn(*args, discount, decay), gae_with()(*args, discount, decay)
    *arrays, last = args
    told = {
        "These are the returns: the advantages come first": want[1],
        "You leave out the discount": gae_with()(*args, 1.0, decay)[0],
        "You leave out the decay": gae_with()(*args, discount, 1.0)[0],
        "You use the discount as the decay and the other way round": gae_with()(
            *args, decay, discount
        )[0],
        "You discount `last_B` twice": gae_with()(*arrays, last * discount, discount, decay)[0],
        "`last_B` is discounted like the value of any next step": gae_with()(
            *arrays, last / discount, discount, decay
        )[0],
        "After the last step comes `last_B`, also where columns are left": next_column(
            *args, discount, decay
        ),
        "These are the errors of single steps": gae_with()(*args, discount, 0.0)[0],
    }
    t.close(got[0], want[0], 1e-4, 1e-4, f"advantages, {why}", mistakes=told)
    reward, value, mask, _ = (np.asarray(x) for x in args)
    told = {
        "You add the reward to the advantage; a return is advantage + value": np.where(
            mask > 0, np.asarray(want[0]) + reward, 0
        ),
        "Yours aren't 0 where the mask is 0": np.asarray(want[0]) + value,
        "These are sums of discounted rewards, which agree only if decay is 1": gae_with(
            returns="rewards"
        )(*args, discount, decay)[1],
        "You add the discounted value to the advantage; the value itself is added": np.where(
            mask > 0, np.asarray(want[0]) + discount * value, 0
        ),
        "A return is advantage + value: you add the value of the next step": np.asarray(want[1])
        - np.where(mask > 0, value, 0)
        + np.where(mask > 0, np.roll(value, -1, 1), 0),
        "You subtract the value from the advantage": np.where(
            mask > 0, np.asarray(want[0]) - value, 0
        ),
        "You return the values alone": np.where(mask > 0, value, 0),
    }
    t.close(got[1], want[1], 1e-4, 1e-4, f"returns, {why}", mistakes=told)


@gae.check("one answer after another")
def _(fn, t):
    for discount, decay in ((1.0, 0.95), (0.9, 0.7)):
        args = episodes(t, 4, 12, cut=False)
        credits(fn, t, args, discount, decay, f"discount = {discount}, decay = {decay}")


@gae.check("decay of 0 and 1")
def _(fn, t):
    for decay in (0.0, 1.0):
        credits(fn, t, episodes(t, 3, 9, cut=False), 0.8, decay, f"decay = {decay}")


@gae.check("answers that were cut off")
def _(fn, t):
    credits(fn, t, episodes(t, 5, 12), 0.9, 0.8, "last_B isn't 0")


@gae.check("tokens of somebody else between")
def _(fn, t):
    for _ in range(2):
        credits(
            fn, t, episodes(t, 5, 24, holes=True), 0.9, 0.8, "tokens between that weren't drawn"
        )


@gae.check("what wasn't drawn")
def _(fn, t):
    for rubbish in (50.0, np.nan, np.inf):
        args = episodes(t, 3, 12, holes=True, empty=rubbish)
        credits(fn, t, args, 0.9, 0.6, f"rewards and values elsewhere are {rubbish}")


@gae.check("one token, no token")
def _(fn, t):
    one = [jnp.asarray(t.rng.normal(size=(3, 1)), jnp.float32) for _ in range(2)]
    last = jnp.asarray(t.rng.normal(size=3), jnp.float32)
    credits(
        fn, t, [*one, jnp.array([[1.0], [0.0], [1.0]]), last], 0.7, 0.9, "T = 1, one row has none"
    )


for name, hint, options in (
    ("no_bootstrap", "After the last step the value is last_B, not 0: the answer was cut off.", {"last": False}),
    ("decay_alone", "The next advantage is multiplied by discount * decay. The discount is missing.",
     {"decays": "decay"}),
    ("no_decay", "The next advantage is multiplied by discount * decay. The decay is missing.",
     {"decays": "discount"}),
    ("not_discounted", "The value of the next step is discounted too.", {"next_step": "undiscounted"}),
    ("no_next_value", "An error compares with reward plus the value that comes next. You left the latter out.",
     {"next_step": "same"}),
    ("whitened", "You bring the advantages to mean 0 and deviation 1. That may come later, and isn't asked for.",
     {"whitened": True}),
    ("without_own_value", "You don't subtract the value of the step itself.", {"minus": False}),
    ("forward", "Your loop runs from the first token to the last. Credit flows the other way.", {"forward": True}),
    ("values_of_holes", "You treat tokens that weren't drawn as steps without reward and value. They aren't steps: "
     "the next step is the next one that was drawn.", {"holes": "worthless"}),
    ("holes_have_no_value", "You use the value of a token that wasn't drawn, or 0, as that of the next step. The "
     "next step is the next token that was drawn.", {"holes": "no value"}),
    ("reset", "At a token that wasn't drawn you start again. It doesn't end the answer.", {"holes": "reset"}),
    ("returns_of_rewards", "A return is advantage + value. The sum of discounted rewards is the same only if decay "
     "is 1.", {"returns": "rewards"}),
    ("returns_without_value", "The return is the advantage plus the value of the step.", {"returns": "error"}),
    ("times_mask", "You multiply by the mask. 0 times NaN is NaN: select with `jnp.where`.", {"masked": "times"}),
    ("starts_with_last", "last_B is a value. The advantage after the last step is 0.", {"start": "last"}),
):  # fmt: skip
    mistaken(gae, name, hint, gae_with(**options))


# -------------------------------------------------------------------------------- honest_reward

honest = Exercise(
    "26.honest_reward",
    title="A reward that can't be fooled",
    function="honest_reward",
    minutes=15,
    points=10,
    statement="""
Write `honest_reward(prompt, answer, ended)` for problems such as `37+58=`, `37-58=` or `37*58=`. It returns 1.0 for a
right answer and 0.0 for every other. The checks are policies that want the reward without doing the sum. They write
whatever earns it.

- A right answer is the result in decimal, as `str` writes it: with `-` if it is negative, and nothing before, after or
  between, no space and no line break.
- It counts only if the model itself ended it. An answer that was cut off might have gone on.
- Whatever is in the answer, no exception escapes, and nothing in the answer is executed. It may have a million
  characters.
""",
    hints=(
        'What do `int("٩٥")`, `int(" 95")`, `int("9_5")` and `int("0095")` return? And what does `$` match in a '
        "regular expression?",
        "You know the one text that is right. You needn't read the answer at all.",
        "`float(ended and answer == str(result))`, where the result comes from the two numbers of the prompt.",
    ),
    forbid=("eval", "exec"),
)


def honest_with(how="text", needs_end=True, operators="+-*", reads=True):
    def result(prompt):
        left, sign, right = re.fullmatch(r"([0-9]+)([-+*])([0-9]+)=", prompt).groups()
        a, b = int(left), int(right)
        sign = sign if sign in operators else "+"
        return {"+": a + b, "-": a - b, "*": a * b}[sign]

    def right(want, prompt, answer):
        text = str(want)
        if how == "contains":
            return text in answer
        if how == "starts":
            return answer.startswith(text)
        if how == "ends":
            return answer.endswith(text)
        if how == "strip":
            return answer.strip() == text
        if how == "dollar":
            return re.match(rf"{re.escape(text)}$", answer) is not None
        if how == "last_number":
            found = re.findall(r"-?[0-9]+", answer)
            return bool(found) and found[-1] == text
        if how == "zeros":
            return re.fullmatch(r"-?[0-9]{1,300}", answer) is not None and int(answer) == want
        if how == "integer":
            try:
                return int(answer) == want
            except ValueError:
                return False
        if how in ("int", "float of anything"):
            return (int if how == "int" else float)(answer) == want
        if how == "without the sign":
            return answer == text.lstrip("-")
        if how == "raises":
            return int(answer) == want if re.fullmatch(r"-?[1-9][0-9]*|0", answer) else False
        if how == "float":
            try:
                return float(answer) == want
            except ValueError:
                return False
        if how == "sums":
            parts = answer.split("+")
            if all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
                return sum(map(int, parts)) == want
            return answer == text
        if how == "commas":
            return answer.replace(",", "") == text
        if how == "plus":
            return answer.lstrip("+") == text
        if how == "absolute":
            return answer.lstrip("-") == text.lstrip("-")
        if how == "equation":
            return answer == text or answer.endswith(f"={text}")
        if how == "digits alone":
            return answer.isdigit() and answer == text
        if how == "a part":
            return 1.0 if answer == text else 0.1 * bool(re.fullmatch("-?[0-9]+", answer))
        if how == "normal":
            import unicodedata

            return unicodedata.normalize("NFKC", answer) == text
        return answer == text

    def fn(prompt, answer, ended):
        if needs_end and not ended:
            return 0.0
        if how == "two digits":
            prompt = f"{int(prompt[:2])}{prompt[2]}{int(prompt[3:5])}="
        if how == "at the plus":
            a, b = prompt[:-1].split("+")
            prompt = f"{int(a)}+{int(b)}="
        return float(right(result(prompt), prompt, answer))

    return fn


def problems(t, count=8):
    for n in range(count):
        a, b = (int(x) for x in t.rng.integers(1, 10 ** int(t.rng.integers(1, 4)), 2))
        sign = "+-*"[n % 3]
        yield f"{a}{sign}{b}=", {"+": a + b, "-": a - b, "*": a * b}[sign]


def rewarded(fn, t, prompt, answer, ended, want, why):
    shown = answer if len(answer) < 40 else answer[:37] + "..."
    got = fn(prompt, answer, ended)
    told = f"{why}: {prompt}{shown!r}"
    t.true(got is not None, f"{told} gets None; an answer that isn't right gets 0.0", "None")
    t.true(not isinstance(got, str), f"{told} gets the text {got!r}; a reward is a number", "text")
    t.true(type(got) is not bool, f"{told} gets {got}; a reward is a float, 1.0 or 0.0", "bool")
    between = "A reward is 1.0 or 0.0: no answer earns a part of it"
    t.close(got, want, 0, 0, told if float(got) in (0.0, 1.0) else f"{told}. {between}")


def paid(fn, t, policy, why, ended=True):
    for prompt, result in problems(t):
        answer = policy(prompt, result)
        if answer == str(result) and ended:
            continue  # the trick did nothing here
        rewarded(fn, t, prompt, answer, ended, 0.0, why)


def honest_answers(fn, t, sign, why):
    for digits in ((1, 1), (2, 2), (3, 1), (1, 4)):
        a, b = (int(t.rng.integers(10 ** (n - 1), 10**n)) for n in digits)
        a, b = sorted((a, b), reverse=True)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        told = f"{why}, numbers of {digits[0]} and {digits[1]} digits"
        if (
            fn(f"{a}{sign}{b}=", str(result), False)
            == 1.0
            != fn(f"{a}{sign}{b}=", str(result), True)
        ):
            told += "; you pay those that were cut off, and not those that the model ended"
        rewarded(fn, t, f"{a}{sign}{b}=", str(result), True, 1.0, told)


@honest.check("honest answers to sums")
def _(fn, t):
    honest_answers(fn, t, "+", "a right answer")


@honest.check("honest answers to products")
def _(fn, t):
    honest_answers(fn, t, "*", "a right answer")


@honest.check("honest answers to differences")
def _(fn, t):
    honest_answers(fn, t, "-", "a right answer")


@honest.check("results below zero")
def _(fn, t):
    for prompt, result in (("3-10=", "-7"), ("58-590=", "-532")):
        rewarded(fn, t, prompt, result, True, 1.0, "a right answer, which is negative")


@honest.check("results of zero, and large ones")
def _(fn, t):
    for prompt, result in (("7-7=", "0"), ("0*58=", "0"), ("999*999=", "998001")):
        rewarded(fn, t, prompt, result, True, 1.0, "a right answer")


@honest.check("wrong answers")
def _(fn, t):
    paid(fn, t, lambda p, r: str(r + int(t.rng.choice([-10, -1, 1, 10]))), "a wrong number")
    paid(fn, t, lambda p, r: "", "nothing")
    paid(fn, t, lambda p, r: str(-r) if r else "1", "the wrong sign")


@honest.check("cut off")
def _(fn, t):
    paid(fn, t, lambda p, r: str(r), "an answer that was cut off", ended=False)


@honest.check("the number is somewhere in it")
def _(fn, t):
    paid(fn, t, lambda p, r: f"{r}{t.rng.integers(0, 9)}", "one more digit")
    paid(
        fn, t, lambda p, r: f"{t.rng.integers(1, 9)}{r}" if r >= 0 else f"1{r}", "one more in front"
    )
    paid(fn, t, lambda p, r: " ".join(str(n) for n in range(r - 9, r + 9)), "all numbers nearby")
    paid(fn, t, lambda p, r: f"{r} {r + 1}", "two answers, the first is right")
    paid(fn, t, lambda p, r: f"{r + 1} or {r}", "two answers, the last is right")


@honest.check("the problem again")
def _(fn, t):
    paid(fn, t, lambda p, r: p[:-1], "the problem instead of its result")
    paid(fn, t, lambda p, r: f"{r}+0", "a sum that would have to be done")
    paid(fn, t, lambda p, r: f"{p}{r}", "the problem with its result: nothing may come before that")


@honest.check("a decimal point")
def _(fn, t):
    paid(fn, t, lambda p, r: f"{r}.0", "a decimal point")
    paid(fn, t, lambda p, r: f"{r}e0", "an exponent")


@honest.check("zeros in front")
def _(fn, t):
    paid(fn, t, lambda p, r: f"{r:07d}", "leading zeros")
    rewarded(fn, t, "7-7=", "-0", True, 0.0, "a zero with a sign")


@honest.check("spaces")
def _(fn, t):
    paid(fn, t, lambda p, r: f" {r}", "a space in front")
    paid(fn, t, lambda p, r: f"{r}" + " " * 500, "many spaces, to be long")


@honest.check("a line break")
def _(fn, t):
    paid(fn, t, lambda p, r: f"{r}\n", "a line break at the end")


@honest.check("a plus")
def _(fn, t):
    paid(fn, t, lambda p, r: f"+{r}" if r >= 0 else str(r), "a plus in front")


@honest.check("other ways to write a number")
def _(fn, t):
    digits = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
    full = str.maketrans("0123456789", "０１２３４５６７８９")
    paid(fn, t, lambda p, r: str(r).translate(full), "full-width digits")
    paid(fn, t, lambda p, r: str(r).translate(digits), "Arabic digits")
    paid(
        fn,
        t,
        lambda p, r: "_".join(str(abs(r))) if r >= 0 else f"-{'_'.join(str(-r))}",
        "underscores",
    )


@honest.check("commas between the digits")
def _(fn, t):
    paid(
        fn,
        t,
        lambda p, r: ("-" if r < 0 else "") + ",".join(str(abs(r))),
        "a comma after each digit but the last, as in 9,5",
    )


@honest.check("very long")
def _(fn, t):
    paid(fn, t, lambda p, r: "9" * 1_000_000, "a million digits")
    paid(fn, t, lambda p, r: f"{'1' * 5000}", "5,000 digits, which int() refuses")
    paid(fn, t, lambda p, r: "(" * 200_000, "200,000 brackets")


for name, hint, options in (
    ("contains", "You look for the number in the answer. A policy that writes all numbers is always right.",
     {"how": "contains"}),
    ("starts", "The answer begins with the number, and goes on.", {"how": "starts"}),
    ("ends", "Whatever comes before the number is ignored: other digits, other answers.", {"how": "ends"}),
    ("last_number", "You take the last number. A policy may write several, and make the last one right.",
     {"how": "last_number"}),
    ("stripped", "You strip spaces. They aren't part of the number, and cost tokens: the statement wants none.",
     {"how": "strip"}),
    ("dollar", "`$` in a regular expression also matches before a line break at the end.", {"how": "dollar"}),
    ("leading_zeros", "You compare numbers, and 0095 is the number 95. Compare the text.", {"how": "zeros"}),
    ("int", "`int()` reads spaces, underscores, a plus and digits of other alphabets.", {"how": "integer"}),
    ("int_raises", "`int()` raises for more than 4,300 digits, although they are digits.", {"how": "raises"}),
    ("int_of_anything", "`int()` raises if the answer isn't a number, and no exception may escape. It also reads "
     "numbers that `str` wouldn't write.", {"how": "int"}),
    ("float_of_anything", "`float()` raises if the answer isn't a number, and no exception may escape. It also reads "
     "numbers that `str` wouldn't write.", {"how": "float of anything"}),
    ("without_the_sign", "You drop the sign of the result. A result below zero is written with `-`.",
     {"how": "without the sign"}),
    ("float", "`float()` reads 95.0 and 9.5e1.", {"how": "float"}),
    ("sums", "You evaluate sums in the answer. A policy that repeats the problem is always right.",
     {"how": "sums"}),
    ("absolute", "You ignore the sign.", {"how": "absolute"}),
    ("commas", "You drop commas. Nothing may be between the digits.", {"how": "commas"}),
    ("plus", "You drop a plus in front of the number. `str` writes none.", {"how": "plus"}),
    ("normalized", "You turn other digits into ASCII ones. `str` writes only these.", {"how": "normal"}),
    ("never_ended", "You ignore `ended`. An answer that was cut off isn't an answer yet.", {"needs_end": False}),
    ("always_adds", "The prompt may have - or * too.", {"operators": "+"}),
    ("splits_at_the_plus", "You treat every problem as a sum. The prompt may have - or * too.",
     {"how": "at the plus"}),
    ("never_multiplies", "You treat a product as something else. The prompt may have + or - or *.",
     {"operators": "+-"}),
    ("never_subtracts", "You treat a difference as a sum. The prompt may have + or - or *.", {"operators": "+*"}),
    ("two_digits", "You cut the prompt at fixed places. A number may have any number of digits.",
     {"how": "two digits"}),
    ("equation", "You look at what comes after `=`. The answer is the result alone.", {"how": "equation"}),
    ("digits_alone", "You want nothing but digits. A result below zero has a `-`.", {"how": "digits alone"}),
    ("pays_a_part", "You give part of the reward for the right form. Everything but the right answer gets 0.0.",
     {"how": "a part"}),
):  # fmt: skip
    mistaken(honest, name, hint, honest_with(**options))
