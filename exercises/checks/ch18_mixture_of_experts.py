from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from minitext.book.grading import Exercise
from minitext.compiler import hlo

# -------------------------------------------------------------------------------------- router

router = Exercise(
    "18.router",
    title="A router",
    function="choose_experts",
    minutes=20,
    points=10,
    statement="""
Write `choose_experts(logits_XE, k, kind, normalize, bias_E=None)`. It returns which k of E experts each token gets, and
with what weights.

- Scores are a softmax over the E logits (`kind="softmax"`) or each logit's own sigmoid (`"sigmoid"`).
- The k experts with the highest *score plus bias* are chosen, best first. The lower number wins a tie.
- The weights are the scores of the chosen experts, without the bias, divided by their sum if `normalize` is true.
- Scores and weights are float32 even if the logits are bfloat16. A softmax may get logits of +-90.
- The weights have a gradient with respect to the logits, but none with respect to the bias.
""",
    hints=(
        "There are three steps: scores, a ranking, a choice. Which part of the ranking may reach the weights?",
        "`jax.lax.top_k` returns values and indices, and puts the lower index first in a tie. Its values contain the "
        "bias, so only the indices are useful here.",
        "`jnp.take_along_axis(scores_XE, experts_Xk, axis=-1)` gives the weights before they are divided. Cast the "
        "logits to float32 before anything else.",
    ),
)


def scores_of(logits, kind):
    logits = np.asarray(logits, np.float64)
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def routed(logits, k, kind, normalize, bias=None):
    scores = scores_of(logits, kind)
    ranking = scores if bias is None else scores + bias
    experts = np.argsort(-ranking, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, experts, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return experts, weights


def routes(fn, t, why, logits, k, kind, normalize, bias=None):
    given = None if bias is None else jnp.asarray(bias, jnp.float32)
    experts, weights = fn(logits, k, kind, normalize, given)
    plain, other = np.asarray(logits, np.float32), "sigmoid" if kind == "softmax" else "softmax"
    want_experts, want_weights = routed(plain, k, kind, normalize, bias)
    scores = scores_of(plain, kind)
    want_scores = np.take_along_axis(scores, want_experts, -1)
    lowest = np.argsort(scores_of(plain, kind) + (0 if bias is None else bias), axis=-1)[:, :k]
    mistakes = {
        "Those have the lowest scores: the highest are chosen": lowest.tolist(),
        "They are chosen by scores times the bias: add it": np.argsort(
            -scores * (1 if bias is None else bias), axis=-1, kind="stable"
        )[:, :k].tolist(),
        "Those are chosen without the bias": routed(plain, k, kind, normalize)[0].tolist(),
        "They are sorted by number: the best comes first": np.sort(want_experts).tolist(),
    }
    t.equal(str(experts.dtype), "int32", why=f"type of the experts, the first result: {why}")
    got, told = np.asarray(experts).tolist(), f"experts: {why}"
    if np.abs(plain).max() > 88:
        told, mistakes = f"{told}, of which exp is more than float32 can hold", {}
    t.equal(got, want_experts.tolist(), why=told, mistakes=mistakes)
    chosen = np.take_along_axis(plain, want_experts, -1)
    sums = np.asarray(weights, np.float64).sum(-1)
    if normalize:
        why += f"; a token's sum to 1, yours to {sums[np.argmax(np.abs(sums - 1))]:.6f}"
    mistakes = {
        f"Those are scores of a {other}": np.take_along_axis(scores_of(plain, other), want_experts, -1),
        f"Those are a {other}'s, normalised": routed(plain, k, other, True, bias)[1],
        "Those are the chosen logits, not their scores": chosen,
        "They are divided by their sum though `normalize` is false": routed(plain, k, kind, True, bias)[1],
        "They are not divided by their own sum though `normalize` is true": routed(plain, k, kind, False, bias)[1],
        "They are divided by the sum of all E scores, not by that of the k chosen": want_scores / scores.sum(
            -1, keepdims=True
        ),
        "Those are a softmax of the chosen scores: divide the scores by their sum": scores_of(
            np.take_along_axis(scores_of(plain, kind), want_experts, -1), "softmax"
        ),
    }  # fmt: skip
    t.close(
        weights, want_weights, rtol=1e-5, atol=1e-7, dtype="float32", why=f"weights: {why}", mistakes=mistakes
    )  # fmt: skip


def random_logits(t, X, E):
    return jnp.asarray(2 * t.rng.normal(size=(X, E)), jnp.float32)


@router.check("a softmax, as it is and normalised")
def _(fn, t):
    E, k = int(t.rng.integers(5, 12)), int(t.rng.integers(2, 4))
    logits = random_logits(t, 9, E)
    routes(fn, t, f"softmax, k = {k} of {E}", logits, k, "softmax", False)
    routes(fn, t, f"softmax, k = {k} of {E}, normalised", logits, k, "softmax", True)


@router.check("sigmoids, as they are and normalised")
def _(fn, t):
    logits = random_logits(t, 7, 6)
    routes(fn, t, "sigmoid, k = 3 of 6", logits, 3, "sigmoid", False)
    routes(fn, t, "sigmoid, k = 3 of 6, normalised", logits, 3, "sigmoid", True)
    routes(fn, t, "sigmoid, k = 1, normalised", logits, 1, "sigmoid", True)
    routes(fn, t, "sigmoid, k = 1, as it is", logits, 1, "sigmoid", False)
    routes(fn, t, "sigmoids of about a millionth, normalised", logits - 14, 3, "sigmoid", True)


@router.check("a bias chooses and does not weigh")
def _(fn, t):
    logits = random_logits(t, 8, 6)
    bias = t.rng.choice([-1.5, 0.0, 0.75], size=6)
    bias[int(t.rng.integers(6))] = 2.0
    for kind in ("softmax", "sigmoid"):
        routes(fn, t, f"{kind} with a bias", logits, 2, kind, False, bias)
        routes(fn, t, f"{kind} with a bias, normalised", logits, 2, kind, True, bias)


@router.check("the bias is added to scores, not to logits")
def _(fn, t):
    # Scores are far apart where logits are close to each other, and the other way round.
    logits = jnp.asarray([[6.0, 8.0, -1.0, 0.5], [0.0, 0.9, -6.0, -4.0]], jnp.float32)
    routes(fn, t, "sigmoid", logits, 2, "sigmoid", False, np.array([0.5, 0.0, 0.9, 0.0]))


@router.check("equal scores")
def _(fn, t):
    logits = jnp.zeros((3, 5), jnp.float32).at[1, 3].set(1.0).at[2, 0].set(-1.0)
    routes(fn, t, "many equal scores", logits, 3, "softmax", True)


@router.check("large logits")
def _(fn, t):
    logits = jnp.asarray(t.rng.permutation([90.0, 89.0, 0.0, -90.0]), jnp.float32)[None]
    routes(fn, t, "logits of +-90", logits, 2, "softmax", False)


@router.check("bfloat16 logits")
def _(fn, t):
    logits = jnp.asarray(t.rng.permuted(np.tile(np.arange(8) / 4, (6, 1)), axis=1), jnp.bfloat16)
    routes(fn, t, "bfloat16 logits", logits, 3, "softmax", True)


@router.check("gradients")
def _(fn, t):
    logits, bias = random_logits(t, 5, 6), jnp.asarray(t.rng.normal(size=6) / 3, jnp.float32)
    pull = jnp.asarray(t.rng.normal(size=(5, 2)), jnp.float32)

    def total(choose, logits, bias):
        return jnp.sum(pull * choose(logits, 2, "softmax", True, bias)[1])

    got = jax.grad(total, argnums=(1, 2))(fn, logits, bias)
    want = jax.grad(total, argnums=1)(right_router, logits, bias)
    t.close(got[0], want, rtol=1e-4, atol=1e-6, why="gradient of the weights by the logits")
    t.close(got[1], np.zeros(6), atol=0, why="gradient of the weights by the bias")


def right_router(
    logits, k, kind, normalize, bias=None, *, wide=True, biased=False, always=False, on="scores"
):
    logits = logits.astype(jnp.float32) if wide else logits
    scores = jax.nn.softmax(logits) if kind == "softmax" else jax.nn.sigmoid(logits)
    ranking = scores if on == "scores" else logits
    if bias is not None:
        ranking = ranking + bias.astype(ranking.dtype)
    best, experts = jax.lax.top_k(ranking, k)
    weights = best if biased else jnp.take_along_axis(scores, experts, axis=-1)
    if normalize or always:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


@router.mutant(
    "Your weights have the bias in them: they are the values that `top_k` returned. The bias only chooses; take the "
    "scores at the chosen indices."
)
def weighs_the_bias(logits, k, kind, normalize, bias=None):
    return right_router(logits, k, kind, normalize, bias, biased=True)


@router.mutant(
    "Your weights are scores without the bias, but you divide them by a sum that has it, so they do not sum to 1. "
    "Divide by the sum of the weights themselves."
)
def divided_by_the_biased(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, False, bias)
    best = right_router(logits, k, kind, False, bias, biased=True)[1]
    return experts, weights / jnp.sum(best, axis=-1, keepdims=True) if normalize else weights


@router.mutant(
    "You sort the chosen experts by their scores. Best first is the order of score plus bias, in which `jax.lax.top_k` "
    "returns them."
)
def sorted_by_score(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, normalize, bias)
    order = jnp.argsort(-weights, axis=-1)
    return tuple(jnp.take_along_axis(x, order, axis=-1) for x in (experts, weights))


@router.mutant(
    "Your softmax is over the tokens. Each token's scores sum to 1 over the experts: `axis=-1`, which is also what "
    "`jax.nn.softmax` takes if you say nothing."
)
def softmax_over_tokens(logits, k, kind, normalize, bias=None):
    if kind == "sigmoid":
        return right_router(logits, k, kind, normalize, bias)
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=0)
    experts = jax.lax.top_k(scores if bias is None else scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    return experts, weights / jnp.sum(weights, axis=-1, keepdims=True) if normalize else weights


@router.mutant(
    "You add the bias to the logits. Add it to the scores, after softmax or sigmoid: they are all between 0 and 1, so "
    "a step of the bias means the same for every token."
)
def bias_on_logits(logits, k, kind, normalize, bias=None):
    return right_router(logits, k, kind, normalize, bias, on="logits")


@router.mutant(
    "Your weights sum to 1 even if `normalize` is false: you always divide by their sum, or your softmax is over the k "
    "chosen logits, which is the same."
)
def softmax_of_the_chosen(logits, k, kind, normalize, bias=None):
    return right_router(logits, k, kind, normalize, bias, always=kind == "softmax")


@router.mutant(
    "You never normalise: the flag `normalize` asks for weights that sum to 1 over the k chosen experts."
)
def never_normalised(logits, k, kind, normalize, bias=None):
    return right_router(logits, k, kind, False, bias)


@router.mutant(
    "You add a small number to the sum that you divide by. If all scores are small, it's a good part of the sum, and "
    "the weights sum to less than 1. A sum of scores is never 0."
)
def with_an_epsilon(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, False, bias)
    total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-6
    return experts, weights / total if normalize else weights


@router.mutant(
    "With `normalize` you divide by the sum of all E scores. For a softmax that's 1, so nothing changes. Divide by the "
    "sum of the k chosen ones."
)
def divided_by_all_scores(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, False, bias)
    if normalize and kind == "sigmoid":
        weights = weights / jnp.sum(jax.nn.sigmoid(logits.astype(jnp.float32)), -1, keepdims=True)
    return experts, weights


@router.mutant(
    "You normalise sigmoids over all E experts. With `normalize` the k chosen ones sum to 1; without it nothing is "
    "divided."
)
def sigmoids_over_all(logits, k, kind, normalize, bias=None):
    if kind == "softmax":
        return right_router(logits, k, kind, normalize, bias)
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
    experts = jax.lax.top_k(scores if bias is None else scores + bias, k)[1]
    return experts, jnp.take_along_axis(scores, experts, axis=-1)


@router.mutant(
    "Your experts come in ascending order: the worst of the chosen first. `jax.lax.top_k` has the best first, and the "
    "lower number in a tie."
)
def worst_first(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, normalize, bias)
    return experts[:, ::-1], weights[:, ::-1]


@router.mutant(
    "You break ties in favour of the higher number. Reversing a sort reverses ties too; `jax.lax.top_k` doesn't."
)
def ties_backwards(logits, k, kind, normalize, bias=None):
    E = logits.shape[-1]
    turned = None if bias is None else bias[::-1]
    experts, weights = right_router(logits[:, ::-1], k, kind, normalize, turned)
    return E - 1 - experts, weights


@router.mutant("exp(90) overflows float32. `jax.nn.softmax` subtracts the largest logit first.")
def naive_softmax(logits, k, kind, normalize, bias=None):
    if kind == "sigmoid":
        return right_router(logits, k, kind, normalize, bias)
    exps = jnp.exp(logits.astype(jnp.float32))
    scores = exps / jnp.sum(exps, axis=-1, keepdims=True)
    experts = jax.lax.top_k(scores if bias is None else scores + bias, k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    return experts, weights / jnp.sum(weights, -1, keepdims=True) if normalize else weights


@router.mutant(
    "Your scores or weights are bfloat16 where the logits are. Eight bits of mantissa make close scores equal: cast "
    "the logits to float32 first, and return float32."
)
def in_bfloat16(logits, k, kind, normalize, bias=None):
    return right_router(logits, k, kind, normalize, bias, wide=False)


@router.mutant(
    "No gradient reaches the logits, so the router would never learn. Only the choice has no gradient."
)
def stopped(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, normalize, bias)
    return experts, jax.lax.stop_gradient(weights)


@router.mutant(
    "Your gradient treats the sum that you divide by as a constant. But the sum changes with the scores: more for one "
    "expert is less for the others."
)
def constant_sum(logits, k, kind, normalize, bias=None):
    experts, weights = right_router(logits, k, kind, False, bias)
    total = jax.lax.stop_gradient(jnp.sum(weights, axis=-1, keepdims=True))
    return experts, weights / total if normalize else weights


# ------------------------------------------------------------------------------------ capacity

capacity = Exercise(
    "18.capacity",
    title="Slots and drops",
    function="place",
    minutes=25,
    points=15,
    statement="""
Write `place(experts_Xk, experts, capacity)`. It gives every assignment in a row of X tokens a slot and counts the
dropped assignments. Expert e has the C slots from `e * C` to `e * C + C - 1`.

- An expert's slots are filled in the order of the tokens, so an assignment's slot depends on earlier tokens alone.
  An assignment whose expert is already full gets the slot `E * C`, which doesn't exist.
- The second result is the exact number of each expert's dropped assignments, as int32, even beyond 256.
- The function runs under `jit`, without a loop over tokens, and no array in it has more than 2 * X * k * E entries.
""",
    hints=(
        "Flatten the assignments with earlier tokens first. An assignment's rank is the number of assignments before "
        "it that have the same expert. The count must be exact, even for thousands of them.",
        "Make a table [X*k, E] of hits and sum it along the first axis: row a of `jnp.cumsum` says how many "
        "assignments each expert has after assignment a.",
        "`before_AE = jnp.cumsum(hits_AE, axis=0) - hits_AE` with integers, and "
        "`rank_A = jnp.sum(before_AE * hits_AE, axis=1)`. A rank below C is a slot. An expert drops its load minus C, "
        "or 0.",
    ),
)


def placed(experts_Xk, E, C):
    """Slots and drops in a loop over assignments."""
    load, slots = np.zeros(E, int), np.full(experts_Xk.shape, E * C)
    for x, chosen in enumerate(experts_Xk):
        for j, e in enumerate(chosen):
            if load[e] < C:
                slots[x, j] = e * C + load[e]
            load[e] += 1
    return slots, np.maximum(load - C, 0)


def choices(t, X, E, k, skew):
    scores = t.rng.normal(size=(X, E)) + skew * np.linspace(1, 0, E)
    return np.argsort(-scores, axis=1)[:, :k].astype(np.int32)


def places(fn, t, experts, E, C, why):
    slots, dropped = jax.jit(fn, static_argnums=(1, 2))(jnp.asarray(experts), E, C)
    want_slots, want_dropped = placed(experts, E, C)
    load = np.bincount(experts.reshape(-1), minlength=E)
    mistakes = {
        "That is how many each expert gets: only those beyond C are dropped": load.tolist(),
        "That is how many each expert keeps": np.minimum(load, C).tolist(),
        "That is the sum over all experts": int(want_dropped.sum()),
        "That is whether an expert drops any": (load > C).tolist(),
        "An expert is taken to have C - 1 slots": np.maximum(load - C + 1, 0).tolist(),
        "An expert is taken to have C + 1 slots": np.maximum(load - C - 1, 0).tolist(),
    }
    got = np.asarray(dropped).tolist()
    t.equal(got, want_dropped.tolist(), why=f"dropped by each expert: {why}", mistakes=mistakes)
    rank, none = want_slots - experts * C, want_slots == E * C
    endless = placed(experts, E, experts.size)[0] - experts * experts.size
    counted = np.arange(experts.size).reshape(experts.shape)
    earlier_tokens = np.arange(len(experts))[:, None]
    mistakes = {
        f"Slots are right, but a dropped assignment has {text}; want E * C": np.where(
            none, slot, want_slots
        ).tolist()
        for text, slot in {
            "-1": -1,
            "0": 0,
            "E": E,
            "C": C,
            "E * C - 1, a slot that exists": E * C - 1,
            "E * C + 1": E * C + 1,
            "its expert's first slot": experts * C,
            "the slot after its expert's last, the first of the next expert": experts * C + C,
            "the slot that its expert would have if it had more": experts * C + endless,
        }.items()
    } | {
        "An expert is taken to have C + 1 slots: C is the last slot's number plus 1": np.where(
            endless <= C, experts * C + endless, E * C
        ).tolist(),
        "Those are ranks within an expert: expert e's slots begin at e * C": np.where(
            none, E * C, rank
        ).tolist(),
        "Those are rank * E + e: expert e's slots are together, from e * C on": np.where(
            none, E * C, rank * E + experts
        ).tolist(),
        "Ranks count earlier assignments to all experts, not to the same one": np.where(
            counted < C, experts * C + counted, E * C
        ).tolist(),
        "Ranks are the tokens' numbers: count only earlier assignments to the same expert": np.where(
            earlier_tokens < C, experts * C + earlier_tokens, E * C
        ).tolist(),
        "A token that loses one of its slots has lost them all": np.where(
            none.any(axis=1, keepdims=True), E * C, want_slots
        ).tolist(),
    }
    t.equal(np.asarray(slots).tolist(), want_slots.tolist(), why=f"slots: {why}", mistakes=mistakes)


@capacity.check("a few tokens by hand")
def _(fn, t):
    experts = np.array([[1, 0], [1, 2], [1, 0], [0, 1], [2, 0]], np.int32)
    places(fn, t, experts, 4, 2, "5 tokens, 4 experts of 2 slots, one of them never chosen")


@capacity.check("a skewed router")
def _(fn, t):
    E, k, X = int(t.rng.integers(4, 9)), int(t.rng.integers(2, 4)), int(t.rng.integers(20, 40))
    C = X * k // E
    places(
        fn, t, choices(t, X, E, k, 3.0), E, C, f"{X} tokens, k = {k}, {E} experts, {C} slots each"
    )


@capacity.check("one expert gets all")
def _(fn, t):
    X = int(t.rng.integers(5, 20))
    experts = np.full((X, 1), 2, np.int32)
    places(fn, t, experts, 3, X // 2, f"{X} tokens of one expert")
    places(fn, t, experts, 3, X, f"{X} tokens of one expert, with room for all")


@capacity.check("one slot, and a row of one token")
def _(fn, t):
    places(fn, t, choices(t, 12, 5, 2, 1.0), 5, 1, "one slot for each expert")
    places(fn, t, np.array([[3, 1]], np.int32), 4, 2, "one token")


@capacity.check("later tokens change nothing")
def _(fn, t):
    X, E, C = 24, 4, 8
    experts = choices(t, X, E, 2, 2.0)
    place = jax.jit(fn, static_argnums=(1, 2))
    whole, _ = place(jnp.asarray(experts), E, C)
    for cut in (5, 15):
        part, _ = place(jnp.asarray(experts[:cut]), E, C)
        t.equal(
            np.asarray(whole)[:cut].tolist(),
            np.asarray(part).tolist(),
            why=f"slots of the first {cut} tokens of {X}, against those of {cut} alone",
        )


@capacity.check("thousands of assignments")
def _(fn, t):
    X = int(t.rng.integers(1500, 1800))
    why = f"{X} tokens; counts beyond 256 are exact in int32, but not in bfloat16, and int8 wraps"
    places(fn, t, choices(t, X, 4, 2, 2.0), 4, X * 2 // 4, why)


@capacity.check("no large array, and integers")
def _(fn, t):
    X, E, k, C = 64, 8, 2, 40
    jaxpr = jax.make_jaxpr(fn, static_argnums=(1, 2))(jnp.zeros((X, k), jnp.int32), E, C)
    largest = max(int(np.prod(v.aval.shape)) for v in variables(jaxpr.jaxpr))
    t.true(
        largest <= 2 * X * k * E,
        why=f"with {X} tokens, k = {k}, {E} experts of {C} slots an array has {largest:,} entries; "
        f"{2 * X * k * E:,} are allowed",
        observed=largest,
    )
    t.equal([str(a.dtype) for a in jaxpr.out_avals], ["int32", "int32"], why="types of the results")


@capacity.check("all tokens at once")
def _(fn, t):
    E, k, C = 8, 2, 16
    few, many = (
        list(equations(jax.make_jaxpr(fn, static_argnums=(1, 2))(
            jnp.zeros((X, k), jnp.int32), E, C
        ).jaxpr))
        for X in (32, 64)
    )  # fmt: skip
    # A loop of Python is as many equations as it has steps; one of `jax.lax` says its length or has none.
    looped = len(many) >= len(few) + 32 or any(
        eqn.primitive.name == "while" or eqn.params.get("length", 0) >= 64 for eqn in many
    )
    t.true(not looped, why="a loop goes through the tokens, one after the other", observed=looped)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def variables(jaxpr):
    for equation in equations(jaxpr):
        yield from equation.outvars


def right_place(
    experts, E, C, *, first=0, dtype=jnp.int32, clip=False, order="tokens", exact_load=False
):
    X, k = experts.shape
    flat = experts.T.reshape(-1) if order == "choices" else experts.reshape(-1)
    flat = flat[::-1] if order == "backwards" else flat
    hits = (flat[:, None] == jnp.arange(E)).astype(dtype)
    before = jnp.cumsum(hits, axis=0, dtype=dtype) - hits
    rank = jnp.sum(before * hits, axis=1).astype(jnp.int32) + first
    slots = jnp.where(rank < C, flat * C + rank, E * C)
    if clip:
        slots = flat * C + jnp.minimum(rank, C - 1)
    load = jnp.sum(hits, axis=0, dtype=jnp.int32 if exact_load else dtype).astype(jnp.int32)
    slots = slots[::-1] if order == "backwards" else slots
    slots = slots.reshape(k, X).T if order == "choices" else slots.reshape(X, k)
    return slots.astype(jnp.int32), jnp.maximum(load - C, 0)


@capacity.mutant(
    "Your ranks begin at 1: `cumsum` counts the assignment itself. An expert's first assignment gets its slot 0."
)
def from_one(experts, E, C):
    return right_place(experts, E, C, first=1)


@capacity.mutant(
    "Your counts stop at 256: bfloat16 has no odd numbers beyond that. Count with integers."
)
def counts_in_bfloat16(experts, E, C):
    hits = experts.reshape(-1)[:, None] == jnp.arange(E)

    def add(count, hit):
        return count + hit.astype(jnp.bfloat16), count

    load, before = jax.lax.scan(add, jnp.zeros(E, jnp.bfloat16), hits)
    rank = jnp.sum(jnp.where(hits, before, 0), axis=1).astype(jnp.int32)
    flat = experts.reshape(-1)
    slots = jnp.where(rank < C, flat * C + rank, E * C).reshape(experts.shape)
    return slots.astype(jnp.int32), jnp.maximum(load.astype(jnp.int32) - C, 0)


@capacity.mutant(
    "Your table of hits is bfloat16, and so are its running sums: above 256 they are rounded. Make it int32."
)
def sums_in_bfloat16(experts, E, C):
    return right_place(experts, E, C, dtype=jnp.bfloat16)


@capacity.mutant(
    "Your loads are exact, but your ranks are running sums in bfloat16, which has no odd numbers above 256. Sum "
    "integers."
)
def ranks_in_bfloat16(experts, E, C):
    return right_place(experts, E, C, dtype=jnp.bfloat16, exact_load=True)


@capacity.mutant(
    "An assignment whose expert is full takes the expert's last slot, which is already taken. Give it the slot E * C."
)
def into_the_last(experts, E, C):
    return right_place(experts, E, C, clip=True)


@capacity.mutant(
    "You place all first choices before all second ones. Then a later token's first choice can take the slot of an "
    "earlier token's second, so the slot depends on the future. Go token by token."
)
def choices_first(experts, E, C):
    return right_place(experts, E, C, order="choices")


@capacity.mutant(
    "You begin with the last token: later tokens push out earlier ones. Slots are filled in the order of the tokens."
)
def last_token_first(experts, E, C):
    return right_place(experts, E, C, order="backwards")


@capacity.mutant(
    "You count each column of choices separately, so a first and a second choice get the same slot. All assignments of "
    "an expert share its slots."
)
def each_column(experts, E, C):
    slots = [right_place(column[:, None], E, C) for column in experts.T]
    return (
        jnp.concatenate([s for s, _ in slots], axis=1),
        right_place(experts, E, C)[1],
    )


@capacity.mutant(
    "Your drops are the load minus the capacity, and can be negative. An expert that has room left drops 0."
)
def negative_drops(experts, E, C):
    slots, _ = right_place(experts, E, C)
    return slots, jnp.sum(experts.reshape(-1, 1) == jnp.arange(E), axis=0, dtype=jnp.int32) - C


@capacity.mutant(
    "You count only tokens that have no slot at all. Count assignments: a token that lost one of its k counts too."
)
def lost_tokens(experts, E, C):
    slots, _ = right_place(experts, E, C)
    lost = jnp.all(slots == E * C, axis=1, keepdims=True) & (slots == E * C)
    hits = experts[..., None] == jnp.arange(E)
    return slots, jnp.sum(hits & lost[..., None], axis=(0, 1), dtype=jnp.int32)


@capacity.mutant(
    "Your table has an entry for every token, expert *and slot*: X * E * C of them, which is X^2 k. One rank for each "
    "assignment says the same in X * k numbers."
)
def one_hot_of_slots(experts, E, C):
    slots, dropped = right_place(experts, E, C)
    table = jax.nn.one_hot(slots, E * C, dtype=jnp.int32)
    some = jnp.sum(table, axis=-1)
    slots = jnp.where(some > 0, jnp.argmax(table, axis=-1), E * C)
    return slots.astype(jnp.int32), dropped


@capacity.mutant(
    "You compare every assignment with every other one. That's (X k)^2 comparisons, so a row twice as long is four "
    "times the work. A running sum over a table [X*k, E] counts how many of each expert came before."
)
def compares_pairs(experts, E, C):
    flat = experts.reshape(-1)
    before = jnp.tri(len(flat), k=-1, dtype=bool)
    rank = jnp.sum((flat[:, None] == flat) & before, axis=1, dtype=jnp.int32)
    slots = jnp.where(rank < C, flat * C + rank, E * C).reshape(experts.shape)
    return slots, right_place(experts, E, C)[1]


@capacity.mutant(
    "You go through the tokens in a loop of tiny steps, and a chip spends each of them waiting. Rank all tokens at "
    "once: `jnp.cumsum` over a table of hits."
)
def token_by_token(experts, E, C):
    def one(load_E, experts_k):
        rank_k = load_E[experts_k]
        slots_k = jnp.where(rank_k < C, experts_k * C + rank_k, E * C)
        return load_E.at[experts_k].add(1), slots_k

    load_E, slots = jax.lax.scan(one, jnp.zeros(E, jnp.int32), experts)
    return slots.astype(jnp.int32), jnp.maximum(load_E - C, 0)


# --------------------------------------------------------------------------------- load_balance

load_balance = Exercise(
    "18.load_balance",
    title="The load-balance loss and its gradient",
    function="balance",
    minutes=30,
    points=15,
    forbid=(
        "jax.grad",
        "jax.value_and_grad",
        "jax.vjp",
        "jax.jvp",
        "jax.jacrev",
        "jax.jacfwd",
        "jax.jacobian",
        "jax.hessian",
        "jax.linearize",
        "jax.linear_transpose",
    ),
    statement="""
Write `balance(logits_XE, k, mask_X)`. It returns the load-balance loss $E\\sum_e f_e P_e$ of section 4 over the tokens
where `mask_X` is true, and its gradient with respect to the logits. Derive the gradient by hand: `jax.grad` and its
relatives aren't allowed.

- $f_e$ is the share of the *assignments* that expert e got, and $P_e$ its mean softmax score. Both include only tokens
  whose mask is true.
- The gradient treats the load as a constant. A token that doesn't count has a gradient of 0.
- If no token counts, loss and gradient are 0, not NaN.
- With $k = E$ the loss is 1 and the gradient 0. Logits of +-90 are possible.
""",
    hints=(
        "Write the loss as one sum over experts and over the n tokens that count: E/n times the sum of f_e p_xe. Since "
        "f is a constant, what is its derivative with respect to one p_xe? And to one logit?",
        "With respect to p_xe, it's E f_e / n. The softmax's backward pass turns any gradient g_xe into p_xe times "
        "(g_xe minus the sum over j of p_xj g_xj).",
        "`E / count * mask * p_XE * (f_E - jnp.sum(f_E * p_XE, axis=1, keepdims=True))`, with "
        "`count = jnp.maximum(jnp.sum(mask), 1)`.",
    ),
)


def right_balance(
    logits, k, mask, *, factor=True, chosen=None, assignments=True, slope=True, mean=True,
    masked=True, safe=True, moving=False, norm=True, counts=("load", "mean", "gradient"), jacobian="whole",
):  # fmt: skip
    E = logits.shape[1]
    mask = mask.astype(jnp.float32)[:, None] if masked else jnp.ones((len(logits), 1))
    count = jnp.maximum(jnp.sum(mask), 1.0) if safe else jnp.sum(mask)
    exps = jnp.exp(logits)
    p = jax.nn.softmax(logits) if norm else exps / jnp.sum(exps, axis=1, keepdims=True)
    hits = jnp.sum(jax.nn.one_hot(jax.lax.top_k(logits, chosen or k)[1], E), axis=1)
    number = {
        part: count if part in counts else len(logits) for part in ("load", "mean", "gradient")
    }
    f = jnp.sum(hits * mask, axis=0) / number["load"] / ((chosen or k) if assignments else 1)
    P_E = jnp.sum(p * mask, axis=0) / number["mean"]
    loss = (E if factor else 1) * jnp.sum((P_E if moving else f) * P_E)
    g = (2 * P_E if moving else f) * (E if factor else 1) / (number["gradient"] if mean else 1)
    if jacobian != "whole":
        return loss, mask * g * (p * (1 - p) if jacobian == "diagonal" else jnp.ones_like(p))
    inner = g - jnp.sum(g * p, axis=1, keepdims=True) if slope else g
    return loss, mask * p * inner


@partial(jax.jit, static_argnums=1)
def by_autodiff(logits, k, mask):
    return jax.value_and_grad(lambda logits: right_balance(logits, k, mask)[0])(logits)


def other_losses(logits, k, mask):
    """Losses with another load or other mean scores, under what is to be said of them."""
    E, n, m = logits.shape[1], max(mask.sum(), 1), mask[:, None]
    p = scores_of(logits, "softmax")
    hits = np.eye(E)[np.argsort(-logits, axis=1, kind="stable")[:, :k]].sum(1)
    chosen = p * hits / (p * hits).sum(1, keepdims=True)
    f, P_E = (hits * m).sum(0) / n / k, (p * m).sum(0) / n
    flat_f, flat_P = np.where(m, hits, np.arange(E) < k), np.where(m, p, 1 / E)
    flat = "Logits of tokens that don't count are 0, and so they choose experts 0 to k - 1: leave them out"
    return {
        f"{flat} of f and P": E * (flat_f.sum(0) / n / k) @ (flat_P.sum(0) / n),
        f"{flat} of f and P, and of the number of tokens": E * (flat_f.mean(0) / k) @ flat_P.mean(0),
        "f includes tokens that don't count": E * (hits.mean(0) / k) @ P_E,
        "f adds tokens that don't count, and is divided by those that do": E * (hits.sum(0) / n / k) @ P_E,
        "P includes tokens that don't count": E * f @ p.mean(0),
        "P adds tokens that don't count, and is divided by those that do": E * f @ (p.sum(0) / n),
        "P is the mean of the weights of chosen experts, not of all scores": E * f @ ((chosen * m).sum(0) / n),
        "P has only the scores of chosen experts": E * f @ ((p * hits * m).sum(0) / n),
        "That is the sum of squared loads: P is missing": E * f @ f,
        "That is divided by E once more: a mean over experts, not a sum": f @ P_E,
    }  # fmt: skip


def other_gradients(logits, k, mask):
    """Gradients with a wrong part, under what is to be said of them."""
    E, n, m = logits.shape[1], max(mask.sum(), 1), mask[:, None]
    p = scores_of(logits, "softmax")
    hits = np.eye(E)[np.argsort(-logits, axis=1, kind="stable")[:, :k]].sum(1)
    f, P_E = (hits * m).sum(0) / n / k, (p * m).sum(0) / n
    parts = {
        "The same mean is subtracted for every token; its own scores weigh it": p * (f - f @ P_E),
        "The plain mean of f is subtracted; a token's scores weigh the mean": p * (f - f.mean()),
        "Subtracted is p times the token's mean, once more": p * (f - p * (p @ f)[:, None]),
        "What is subtracted is a mean over experts; it's their sum": p * (f - (p @ f)[:, None] / E),
        "The score before what is subtracted is missing": f - (p @ f)[:, None],
        "f is the token's own choice there, not the load of all tokens": p
        * (hits / k - (p * hits / k).sum(1, keepdims=True)),
        "All tokens' mean scores weigh it, not each token's own": P_E * (f - f @ P_E),
    }
    return {text: E / n * m * part for text, part in parts.items()}


def balances(fn, t, logits, k, mask, why, rtol=1e-4):
    logits, mask = jnp.asarray(logits, jnp.float32), jnp.asarray(mask)
    got = fn(logits, k, mask)

    want = by_autodiff(logits, k, mask)
    E, loss, gradient = logits.shape[1], *map(np.asarray, want)
    mistakes = other_losses(np.asarray(logits), k, np.asarray(mask)) | {
        "It is k times the loss: f is a share of the assignments, and a token has k of them": k
        * loss,
        "It is the loss times the number of tokens that count": loss * np.sum(mask),
        "It is the loss minus 1, which is what an even load gives": loss - 1,
    }
    t.close(
        got[0], loss, rtol=rtol, atol=1e-6, dtype="float32", why=f"loss: {why}", mistakes=mistakes
    )
    scale = max(1e-2, float(np.abs(gradient).max()))
    mistakes = {
        f"It is the gradient times {text}": factor * gradient
        for text, factor in {
            "-1": -1.0,
            "2": 2.0,
            "k": k,
            "1/k": 1 / k,
            "E": E,
            "1/E": 1 / E,
            "the number of tokens that count": np.sum(mask),
        }.items()
    }
    mistakes |= other_gradients(np.asarray(logits), k, np.asarray(mask))
    counted = np.asarray(mask)[:, None]
    if counted.any() and not counted.all() and np.asarray(got[1]).shape == gradient.shape:
        stray = np.abs(np.where(counted, 0, got[1])).max() > 0
        why += "; tokens that don't count have a gradient" if stray else ""
    t.close(
        got[1], gradient, rtol=rtol, atol=1e-5 * scale, why=f"gradient: {why}", mistakes=mistakes
    )


def drawn(t, X, E, skew=1.0):
    return t.rng.normal(size=(X, E)) + skew * np.linspace(1, 0, E)


@load_balance.check("one expert each")
def _(fn, t):
    X, E = int(t.rng.integers(5, 20)), int(t.rng.integers(3, 9))
    balances(fn, t, drawn(t, X, E), 1, np.ones(X, bool), f"{X} tokens, {E} experts, k = 1")


@load_balance.check("several experts each")
def _(fn, t):
    X, E, k = 14, 6, int(t.rng.integers(2, 5))
    balances(fn, t, drawn(t, X, E), k, np.ones(X, bool), f"{X} tokens, {E} experts, k = {k}")


@load_balance.check("tokens that do not count")
def _(fn, t):
    X = 14
    mask = t.rng.permutation(np.arange(X) < 5)
    balances(fn, t, drawn(t, X, 6), 2, mask, f"5 tokens of {X} count")


@load_balance.check("no token counts")
def _(fn, t):
    balances(fn, t, drawn(t, 14, 6), 2, np.zeros(14, bool), "an empty mask")


@load_balance.check("all the experts each, and even logits")
def _(fn, t):
    balances(fn, t, drawn(t, 14, 6), 6, np.ones(14, bool), "k = E = 6")
    balances(fn, t, np.zeros((14, 6)), 2, np.ones(14, bool), "equal logits: all choose 0 and 1")


@load_balance.check("large logits")
def _(fn, t):
    logits = t.rng.permuted(np.tile([90.0, 30.0, 0.0, -90.0], (6, 1)), axis=1)
    balances(fn, t, logits, 1, np.ones(6, bool), "logits of +-90")


@load_balance.check("a step against the gradient evens the shares")
def _(fn, t):
    logits = jnp.asarray(drawn(t, 14, 6, skew=2.0), jnp.float32)
    before, gradient = fn(logits, 2, jnp.ones(14, bool))
    hits = np.sum(np.eye(6)[np.argsort(-np.asarray(logits), axis=1)[:, :2]], axis=1)
    shares = scores_of(logits - 0.1 * gradient, "softmax")
    after = 6 * float(np.sum(hits.mean(0) / 2 * shares.mean(0)))
    t.true(
        after < float(before),
        why="a small step against the gradient does not lower the loss at the same load",
        observed=after - float(before),
    )


@load_balance.mutant(
    "Your load is a share of tokens, and sums to k. Divide by the number of assignments, k for each token."
)
def of_tokens(logits, k, mask):
    return right_balance(logits, k, mask, assignments=False)


@load_balance.mutant("The factor E is missing: an even load must give 1 for any number of experts.")
def no_factor(logits, k, mask):
    return right_balance(logits, k, mask, factor=False)


@load_balance.mutant("You count first choices only. All k experts of a token have to compute it.")
def first_choices(logits, k, mask):
    return right_balance(logits, k, mask, chosen=1)


@load_balance.mutant(
    "Your means include tokens that don't count. A padded batch would balance its padding."
)
def padding_counts(logits, k, mask):
    return right_balance(logits, k, mask, masked=False)


@load_balance.mutant(
    "You sum over the tokens that count and divide by all X. Load, mean and gradient are divided by the number of "
    "tokens that count."
)
def divided_by_all(logits, k, mask):
    return right_balance(logits, k, mask, counts=())


@load_balance.mutant(
    "Your loss is too small: one of f and P is divided by all X tokens. Both are over the tokens that count."
)
def one_divided_by_all(logits, k, mask):
    return right_balance(logits, k, mask, counts=("mean",))


@load_balance.mutant(
    "Your loss is right, but you divide its gradient by all X tokens. P is a mean over those that count: divide by "
    "their number."
)
def gradient_divided_by_all(logits, k, mask):
    return right_balance(logits, k, mask, counts=("load", "mean"))


@load_balance.mutant(
    "You return the gradient by the probabilities: E f_e over the number of tokens. The gradient by the logits goes "
    "through the softmax too, which turns any g_xe into p_xe times (g_xe minus the sum over j of p_xj g_xj)."
)
def by_probabilities(logits, k, mask):
    return right_balance(logits, k, mask, jacobian="none")


@load_balance.mutant(
    "You differentiate each probability by its own logit alone, p (1 - p). A logit moves all the probabilities of its "
    "token: those of other experts by -p_xe p_xj."
)
def diagonal_alone(logits, k, mask):
    return right_balance(logits, k, mask, jacobian="diagonal")


@load_balance.mutant("If no token counts, you divide 0 by 0 and return NaN.")
def nothing_by_nothing(logits, k, mask):
    return right_balance(logits, k, mask, safe=False)


@load_balance.mutant(
    "You multiply the gradient by the probabilities with the probabilities, but that's only half of the softmax's "
    "derivative. Its outputs sum to 1, so it also subtracts the mean: g minus the sum of p g."
)
def no_softmax_slope(logits, k, mask):
    return right_balance(logits, k, mask, slope=False)


@load_balance.mutant(
    "Your gradient is that of a sum over tokens. P is a mean: divide by the number of tokens that count."
)
def gradient_of_a_sum(logits, k, mask):
    return right_balance(logits, k, mask, mean=False)


@load_balance.mutant(
    "You square the mean probabilities. The load counts what was *chosen*: whether an expert is among the k highest."
)
def squared_means(logits, k, mask):
    return right_balance(logits, k, mask, moving=True)


@load_balance.mutant(
    "exp(90) overflows in your softmax. `jax.nn.softmax` subtracts the largest logit first."
)
def overflowing(logits, k, mask):
    return right_balance(logits, k, mask, norm=False)


@load_balance.mutant("Your gradient has the wrong sign: a step against it would raise the loss.")
def other_sign(logits, k, mask):
    loss, gradient = right_balance(logits, k, mask)
    return loss, -gradient


# ----------------------------------------------------------------------------------- all_to_all

all_to_all = Exercise(
    "18.all_to_all",
    title="To the experts and back",
    function="through_experts",
    minutes=25,
    points=15,
    devices=8,
    statement="""
Write `through_experts(slots_ECD, compute, axis)`, which is called inside a `shard_map` over n devices. Each device
has C slots for every one of E experts, and device d holds the E/n experts that start at d E/n. Send the slots to their
experts' devices, compute there, and bring each result back to its slot.

- `compute` is called once, with [E/n, n*C, D]: for each of this device's experts, the slots of device 0, then of
  device 1, and so on. It returns [E/n, n*C, F], and F may differ from D.
- Only the slots and their results are sent, each once, in their own dtype: a device sends (n-1)/n of what it has, each
  way. The checks read the bytes in the HLO, for the gradient too.
- The mesh may have two axes, and C may be 1.
""",
    hints=(
        "Which dimension of [E, C, D] is split over devices during the computation, and which before and after it? "
        "An all-to-all moves the split from one dimension to another, and the way back is its mirror image.",
        "On the way there, split the experts, and concatenate arriving slots along the slots' dimension. On the way "
        "back, do the opposite. The transpose of an all-to-all is an all-to-all, so you needn't write a gradient.",
        "`jax.lax.all_to_all(slots_ECD, axis, split_axis=0, concat_axis=1, tiled=True)` is [E/n, n*C, D]; the way "
        "back has split_axis=1 and concat_axis=0.",
    ),
)


def mesh_of(*sizes):
    names = tuple("ab"[: len(sizes)])
    return jax.make_mesh(sizes, names, devices=jax.devices()[: int(np.prod(sizes))])


def expert_layer(fn, mesh, axis, shapes=None):
    """A jitted function of slots and weights: each device has slots [E, C, D] and weights [E/n, D, F]."""

    def local(slots, w):
        def compute(rows):
            if shapes is not None:
                shapes.append(tuple(rows.shape))
            y = jnp.einsum("esd,edf->esf", rows, w, preferred_element_type=jnp.float32)
            # Where a row stands matters as well.
            place = 1 + jnp.arange(rows.shape[1], dtype=jnp.float32) / 64
            return (y * place[None, :, None]).astype(rows.dtype)

        return fn(slots, compute, axis)

    names = P(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(names, P(axis)), out_specs=names))


def put(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def expected(slots, w, mesh, axis):
    """What one device with all experts makes of the slots of all devices."""
    n, (E, _, F), C = mesh.shape[axis], w.shape, slots.shape[1]
    by_device = np.asarray(slots, np.float64).reshape(mesh.size, E, C, -1)
    y = np.einsum("necd,edf->necf", by_device, np.asarray(w, np.float64))
    last = list(mesh.shape)[-1] == axis
    numbers = np.arange(mesh.size) % n if last else np.arange(mesh.size) // (mesh.size // n)
    place = 1 + (numbers[:, None] * C + np.arange(C)) / 64
    return (y * place[:, None, :, None]).reshape(-1, C, F)


def was_given(t, given, per, n, C, D, why):
    """Checks the shapes that `compute` was called with."""
    others = {
        "That is still [E, C, D]: nothing was exchanged, or arriving slots were joined with the experts instead of the "
        "slots": (per * n, C, D),
        "Those are one device's slots; there are n senders": (per, C, D),
        "That is every expert's slots, gathered; keep only this device's experts": (
            per * n,
            n * C,
            D,
        ),
        "Arriving slots are joined along D, not along the slots": (per, C, n * D),
        "The device's slots are split, not its experts": (per * n * n, C // n, D),
        "There is a dimension for the experts missing, and one for the senders too many; compare "
        "`tiled=False` with `tiled=True`": (C, n, D),
    }
    told = f"what compute was given, {given}; want [E/n, n*C, D] = {[per, n * C, D]}: {why}"
    mistakes = {text: [shape] for text, shape in others.items() if shape != (per, n * C, D)}
    t.equal(given, [(per, n * C, D)], why=told, mistakes=mistakes)


def goes_through(fn, t, mesh, axis, per, C, D, F, dtype="float32", rtol=1e-4):
    n = mesh.shape[axis]
    slots = jnp.asarray(t.rng.normal(size=(mesh.size * per * n, C, D)), dtype)
    w = jnp.asarray(t.rng.normal(size=(per * n, D, F)), dtype)
    shapes = []
    program = expert_layer(fn, mesh, axis, shapes)
    why = f"{n} devices, {per * n} experts, {C} slots each, D = {D}, F = {F}"
    try:
        got = program(put(mesh, P(mesh.axis_names), slots), put(mesh, P(axis), w))
    finally:  # After a wrong way there the way back may raise, and its error would mislead.
        if shapes:
            was_given(t, sorted(set(shapes)), per, n, C, D, why)
    t.true(shapes, f"compute was never called: {why}")
    want = expected(slots, w, mesh, axis)
    t.close(np.asarray(got.astype(jnp.float32)), want, rtol=rtol, atol=4 * rtol, why=why)
    t.equal(str(got.dtype), dtype, why="the result's dtype; slots and results are sent as they are")
    t.equal(len(shapes), 1, why="calls of compute in the program")


@all_to_all.check("one expert a device")
def _(fn, t):
    goes_through(fn, t, mesh_of(8), "a", 1, int(t.rng.integers(2, 5)), 6, 5)


@all_to_all.check("several experts a device, one slot each")
def _(fn, t):
    goes_through(fn, t, mesh_of(8), "a", 3, 1, 4, 4)
    goes_through(fn, t, mesh_of(4), "a", 2, 3, 4, 6)


@all_to_all.check("one axis of two")
def _(fn, t):
    goes_through(fn, t, mesh_of(2, 4), "b", 2, 3, 5, 4)


@all_to_all.check("bfloat16")
def _(fn, t):
    goes_through(fn, t, mesh_of(8), "a", 2, 2, 8, 4, "bfloat16", rtol=5e-2)


def sent(program, mesh, per, C, D, F, dtype):
    E = 8 * per
    slots = jax.ShapeDtypeStruct((8 * E, C, D), dtype, sharding=NamedSharding(mesh, P("a")))
    w = jax.ShapeDtypeStruct((E, D, F), dtype, sharding=NamedSharding(mesh, P("a")))
    text = program.lower(slots, w).compile().as_text()
    return hlo.Module(text).collectives()


def only_tokens(t, found, want, why):
    kinds = sorted({c.kind for c in found})
    why = f"bytes sent by each device, by {' and '.join(kinds) or 'no collective'}: {why}"
    t.equal(int(sum(c.runs * c.moved for c in found)), want, why=why)
    t.equal(kinds, ["all-to-all"], why="kinds of collectives")


@all_to_all.check("collectives and bytes, forward")
def _(fn, t):
    mesh, per, C, D, F = mesh_of(8), 2, int(t.rng.integers(2, 6)), 6, 10
    found = sent(expert_layer(fn, mesh, "a"), mesh, per, C, D, F, "int8")
    why = f"{8 * per} experts on 8 devices, C = {C}, int8, D = {D}, F = {F}"
    only_tokens(t, found, 7 * per * C * (D + F), why)


@all_to_all.check("collectives and bytes, with the gradient")
def _(fn, t):
    mesh, per, C, D = mesh_of(8), 1, int(t.rng.integers(2, 6)), 4
    program = expert_layer(fn, mesh, "a")

    def pulled(slots, w):
        y, pull = jax.vjp(program, slots, w)
        return y, pull(y)

    found = sent(jax.jit(pulled), mesh, per, C, D, D, "float32")
    only_tokens(t, found, 4 * 7 * per * C * D * 4, f"there, back, both gradients, C = {C}, D = {D}")


def both_ways(slots, compute, axis):
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.all_to_all(compute(there), axis, split_axis=1, concat_axis=0, tiled=True)


@all_to_all.mutant(
    "You gather all slots on every device and keep a part: n times the bytes of an all-to-all."
)
def gathers(slots, compute, axis):
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    e = slots.shape[0] // n
    whole = jax.lax.all_gather(slots, axis)  # [n, E, C, D]
    mine = jax.lax.dynamic_slice_in_dim(whole, me * e, e, axis=1)
    rows = jnp.swapaxes(mine, 0, 1).reshape(e, -1, slots.shape[2])
    return jax.lax.all_to_all(compute(rows), axis, split_axis=1, concat_axis=0, tiled=True)


@all_to_all.mutant(
    "Your way back is an all-gather: every device gets the results of all others' slots, n times what it needs."
)
def gathers_back(slots, compute, axis):
    me, C = jax.lax.axis_index(axis), slots.shape[1]
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    whole = jax.lax.all_gather(compute(there), axis, axis=0, tiled=True)  # [E, n*C, F]
    return jax.lax.dynamic_slice_in_dim(whole, me * C, C, axis=1)


@all_to_all.mutant(
    "The arriving rows are sorted by sender, then by expert, and you only reshape them. That mixes rows of different "
    "experts: swap the two dimensions first, or concatenate along the slots."
)
def reshaped(slots, compute, axis):
    n = jax.lax.axis_size(axis)
    E, C, D = slots.shape
    there = jax.lax.all_to_all(slots, axis, 0, 0, tiled=True).reshape(E // n, n * C, D)
    return jax.lax.all_to_all(compute(there).reshape(E, C, -1), axis, 0, 0, tiled=True)


@all_to_all.mutant(
    "You deal experts out like cards: device d would have d, d + n and so on. Here it has E/n consecutive ones."
)
def dealt(slots, compute, axis):
    n, E = jax.lax.axis_size(axis), slots.shape[0]
    order = jnp.arange(E).reshape(E // n, n).T.reshape(-1)
    return both_ways(slots[order], compute, axis)[jnp.argsort(order)]


@all_to_all.mutant(
    "The rows of each expert are sorted by slot, then by sender. They should come device by device."
)
def interleaved(slots, compute, axis):
    n = jax.lax.axis_size(axis)

    def turned(rows):
        e, S, D = rows.shape
        y = compute(rows.reshape(e, n, S // n, D).swapaxes(1, 2).reshape(e, S, D))
        return y.reshape(e, S // n, n, -1).swapaxes(1, 2).reshape(e, S, -1)

    return both_ways(slots, turned, axis)


@all_to_all.mutant(
    "You send float32 although the slots have fewer bits. Nothing is computed on the way: send them as they are."
)
def sent_wide(slots, compute, axis):
    wide = slots.astype(jnp.float32)
    there = jax.lax.all_to_all(wide, axis, split_axis=0, concat_axis=1, tiled=True)
    y = compute(there.astype(slots.dtype)).astype(jnp.float32)
    back = jax.lax.all_to_all(y, axis, split_axis=1, concat_axis=0, tiled=True)
    return back.astype(slots.dtype)


@all_to_all.mutant(
    "No slot leaves its device: your experts get this device's own slots only. An all-to-all is missing."
)
def stays(slots, compute, axis):
    n = jax.lax.axis_size(axis)
    E, C, D = slots.shape
    return compute(slots.reshape(E // n, n * C, D)).reshape(E, C, -1)


@all_to_all.mutant(
    "Results don't go home: you return what this device's experts computed for other devices' slots. A second "
    "all-to-all is missing."
)
def one_way(slots, compute, axis):
    E, C, _ = slots.shape
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    return compute(there).reshape(E, C, -1)


@all_to_all.mutant(
    "You call compute once for each sender. Products with few rows leave a chip idle: make one call with all rows."
)
def call_by_call(slots, compute, axis):
    n = jax.lax.axis_size(axis)
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    y = jnp.concatenate([compute(part) for part in jnp.split(there, n, axis=1)], axis=1)
    return jax.lax.all_to_all(y, axis, split_axis=1, concat_axis=0, tiled=True)


@all_to_all.mutant(
    "On the way back you reshape the results as if they were sorted by sender, but they are sorted by expert: swap the "
    "two dimensions before you send them, or split along the slots."
)
def not_swapped_back(slots, compute, axis):
    E, C, _ = slots.shape
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.all_to_all(compute(there).reshape(E, C, -1), axis, 0, 0, tiled=True)


@all_to_all.mutant(
    "You give the results the slots' width D. The rows that `compute` returns have F numbers, and F may differ from D."
)
def width_of_the_slots(slots, compute, axis):
    return both_ways(slots, compute, axis).reshape(slots.shape)


@all_to_all.mutant(
    "One of your two ways splits and joins the wrong dimensions, perhaps because the way back repeats the way there. "
    "There, the experts are split and arriving slots joined. The way back undoes that."
)
def there_twice(slots, compute, axis):
    there = jax.lax.all_to_all(slots, axis, split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.all_to_all(compute(there), axis, split_axis=0, concat_axis=1, tiled=True)


# -------------------------------------------------------------------------------------- copies

copies = Exercise(
    "18.copies",
    title="Copies of busy experts",
    function="spread_experts",
    minutes=40,
    points=20,
    statement="""
A server can't change the router of a finished model, and its busiest device decides how long a step takes. But it has
measured how many tokens each expert gets, and it may keep copies of an expert on several devices and send each copy a
part of that expert's tokens. How can it give every device exactly the same number of tokens?

Write `spread_experts(loads, devices, slots)`. `loads` holds the number of tokens of each of E experts. It returns a
list of dicts, one for each device, that map an expert's number to the tokens it gets there.

- Each device gets the same number of tokens. The sum of `loads` is a multiple of `devices`, and tokens can't be split.
- A device has room for at most `slots` experts, whether they get tokens or not.
- Every token of every expert goes somewhere, and every expert is on at least one device, even if its load is 0: the
  next batch may need it. A copy may get 0 tokens.
- There are enough slots: `devices * (slots - 1) >= E - 1`. Then it's always possible, for any loads. Finding out why is
  most of the exercise.
- Your function has at most a few seconds for hundreds of experts and devices. If several answers fit, return any of
  them.
""",
    hints=(
        "Take as many devices as experts, and two slots on each. Some expert has at most a device's share of the "
        "tokens, and another at least that. What can these two do for one device? And what problem is left?",
        "Fill one device completely, so that the rest is the same problem with one device fewer. For that it has to "
        "finish `slots - 1` experts, and it may take a part of one more. Look at groups of `slots` neighbours in the "
        "order of their loads: the group of the smallest may hold too little, that of the largest holds enough.",
        "Sort by load, and take the first group of `slots` neighbours that holds at least a share. All but its "
        "largest go there whole. Why do they fit? The largest fills the device up, and what is left of it goes back "
        "among the others. Before each device, add empty experts until there are `devices_left * (slots - 1) + 1`.",
    ),
)  # fmt: skip


def skewed_loads(t, experts, devices, skew=1.5):
    """Loads that mostly fall on a few experts, in any order; their sum is a multiple of `devices`."""
    loads = [int(x) for x in 3 + 900 * np.exp(skew * t.rng.normal(size=experts))]
    loads[int(t.rng.integers(experts))] += -sum(loads) % devices
    return loads


def is_even(t, fn, loads, devices, slots):
    plan = fn(list(loads), devices, slots)
    case = f"{len(loads)} experts, {devices} device{'s' * (devices > 1)} with {slots} slots"
    t.true(
        isinstance(plan, list) and all(isinstance(device, dict) for device in plan),
        f"{case}: the answer is a list of dicts", str(plan)[:80],
    )  # fmt: skip
    t.equal(len(plan), devices, why=f"{case}: dicts in the list")
    plan = [dict(device) for device in plan]
    experts = sorted({expert for device in plan for expert in device})
    known = [expert for expert in experts if expert in range(len(loads))]
    t.equal(experts, known, why=f"{case}: keys of the dicts; some are no expert's number")
    counts = [tokens for device in plan for tokens in device.values()]
    kinds = [type(tokens) for tokens in counts if not isinstance(tokens, int | np.integer)]
    why = f"{case}: tokens are whole, ints; there is a {kinds[0].__name__}" if kinds else ""
    t.true(not kinds, why, [str(type(tokens)) for tokens in counts[:20]])
    least = min(counts, default=0)
    why = f"{case}: a device gets {least} tokens of an expert, because it is given more than a share of the others"
    t.true(least >= 0, why, counts)
    got = [sum(device.get(expert, 0) for device in plan) for expert in range(len(loads))]
    why = f"{case}: each expert's tokens on all devices"
    lost = sum(loads) - sum(got)
    if lost:
        why += f"; {lost} tokens go nowhere" if lost > 0 else f"; {-lost} tokens are made up"
        share, empty = sum(loads) // devices, [slots - len(device) for device in plan]
        full = [
            d for d, device in enumerate(plan) if sum(device.values()) >= share and empty[d] > 0
        ]
        less = [d for d, device in enumerate(plan) if sum(device.values()) < share and not empty[d]]
        if lost > 0 and full and less:
            why += f". Device {full[0]} has its share of tokens and an empty slot, device {less[0]} the other way round"
    mistakes = {
        "Of a load that isn't a multiple of `devices`, the remainder is lost": [
            x // devices * devices for x in loads
        ],
        "Each copy of an expert has all of its tokens": [
            x * sum(expert in device for device in plan) for expert, x in enumerate(loads)
        ],
    }
    t.equal(got, list(loads), why=why, mistakes=mistakes)
    used = [len(device) for device in plan]
    full = [d for d, number in enumerate(used) if number > slots]
    why = f"{case}: there are {used} experts on the devices, too many on numbers {full[:4]}"
    t.true(max(used) <= slots, why, [sorted(map(int, device.values())) for device in plan])
    got = [sum(device.values()) for device in plan]
    t.equal(got, [sum(loads) // devices] * devices, why=f"{case}: tokens on each device")
    # An expert without tokens first: it's the one that is forgotten.
    on = sorted({expert for device in plan for expert in device})
    t.equal(on, list(range(len(loads))), why=f"{case}: experts that are on some device")


@copies.check("one device")
def _(fn, t):
    is_even(t, fn, skewed_loads(t, 5, 1), 1, 5)


@copies.check("as many devices as experts, with two slots")
def _(fn, t):
    is_even(t, fn, skewed_loads(t, 6, 6), 6, 2)


@copies.check("several slots, not one more than needed")
def _(fn, t):
    is_even(t, fn, skewed_loads(t, 10, 3), 3, 4)
    is_even(t, fn, skewed_loads(t, 13, 4, skew=0.7), 4, 4)


@copies.check("a few busy experts, many idle ones")
def _(fn, t):
    loads = [*(int(x) for x in t.rng.integers(1, 5, size=14)), 4000, 2500]
    loads[-1] += -sum(loads) % 5
    is_even(t, fn, [loads[i] for i in t.rng.permutation(16)], 5, 4)


@copies.check("loads that are nearly even")
def _(fn, t):
    loads = [int(x) for x in t.rng.integers(90, 110, size=13)]
    loads[0] += -sum(loads) % 4
    is_even(t, fn, loads, 4, 4)
    is_even(t, fn, [12] * 9, 4, 3)


@copies.check("one expert has all the tokens")
def _(fn, t):
    loads = [0] * 7
    loads[int(t.rng.integers(7))] = 6 * int(t.rng.integers(5, 90))
    is_even(t, fn, loads, 3, 3)
    is_even(t, fn, [0] * 7, 3, 3)


@copies.check("one expert on several devices, with one slot")
def _(fn, t):
    is_even(t, fn, [4 * int(t.rng.integers(5, 90))], 4, 1)


@copies.check("more slots than needed")
def _(fn, t):
    is_even(t, fn, skewed_loads(t, 9, 4), 4, 5)
    is_even(t, fn, skewed_loads(t, 3, 5), 5, 4)
    is_even(t, fn, skewed_loads(t, 3, 5, skew=0.1), 5, 4)


@copies.check("fewer tokens than experts")
def _(fn, t):
    loads = [1] * 6 + [0] * 7
    is_even(t, fn, [loads[i] for i in t.rng.permutation(13)], 3, 5)


@copies.check("a large model on many devices")
def _(fn, t):
    for skew in (0.5, 1.5, 2.5):
        is_even(t, fn, skewed_loads(t, 257, 64, skew), 64, 5)


def spread(loads, devices, slots, start=None, pad=True, least=0, cuts=-1, rests=True):
    """The right answer, with what one gets wrong as arguments."""
    share = sum(loads) // devices
    left = [(load, expert) for expert, load in enumerate(loads)]
    plan = []
    for more in reversed(range(devices)):
        left = sorted(left + ((more + 1) * (slots - 1) + 1 - len(left)) * [(0, -1)] * pad)
        sums = [sum(x for x, _ in left[i : i + slots]) for i in range(len(left))]
        begin = next((i for i, total in enumerate(sums) if total >= share), 0)
        begin = begin if start is None else start(left)
        group = left[begin : begin + slots]
        if not group:
            plan.append({})
            continue
        whole = list(group)
        load, cut = whole.pop(cuts)
        part = min(load, max(least, share - sum(x for x, _ in whole)))
        plan.append({expert: x for x, expert in [*whole, (part, cut)] if expert >= 0})
        left[begin : begin + slots] = [(load - part, cut)] if load > part and rests else []
    return plan


def wrapped(loads, devices, order):
    """Fills one device after another in the order, and cuts where a device is full."""
    share = sum(loads) // devices
    plan = [{} for _ in range(devices)]
    free, d = share, 0
    for expert in order:
        load = loads[expert]
        while load > free:
            plan[d][expert] = free
            load, free, d = load - free, share, d + 1
        plan[d][expert] = load
        free -= load
    return plan


def falling(loads):
    return sorted(range(len(loads)), key=lambda expert: -loads[expert])


@copies.mutant(
    "You give each expert to one device, whole. An expert with more than a device's share fits on none: it "
    "needs copies."
)
def whole_experts(loads, devices, slots):
    plan = [{} for _ in range(devices)]
    for expert in falling(loads):
        open_ = [device for device in plan if len(device) < slots]
        min(open_, key=lambda device: sum(device.values()))[expert] = loads[expert]
    return plan


@copies.mutant(
    "You split each expert's tokens over all devices. That's even, but then each device needs room for every expert."
)
def everywhere(loads, devices, slots):
    plan = [{} for _ in range(devices)]
    first = 0
    for expert, load in enumerate(loads):
        for i in range(devices):
            plan[(first + i) % devices][expert] = load // devices + (i < load % devices)
        first += load % devices
    return plan


@copies.mutant(
    "You fill one device after another, in the order of the experts' numbers. A device that meets many small experts "
    "in a row has no slots for them. Give a device small and large ones."
)
def fills_in_order(loads, devices, slots):
    return wrapped(loads, devices, range(len(loads)))


@copies.mutant(
    "You fill one device after another, the largest experts first. The last devices then get all the small ones, "
    "more than they have slots for."
)
def fills_largest_first(loads, devices, slots):
    return wrapped(loads, devices, falling(loads))


@copies.mutant(
    "You fill one device after another, the smallest experts first. The first devices then get more small ones than "
    "they have slots for."
)
def fills_smallest_first(loads, devices, slots):
    return wrapped(loads, devices, falling(loads)[::-1])


@copies.mutant(
    "You fill a device with the smallest experts first, and when its slots are used up it may have less than its "
    "share. Start higher up in the order where the smallest hold too little."
)
def smallest_neighbours(loads, devices, slots):
    return spread(loads, devices, slots, start=lambda left: 0)


@copies.mutant(
    "You fill a device with the largest experts. Often one of them is enough, so the slots stay empty that the small "
    "experts need later: each device has to finish `slots - 1` experts."
)
def largest_first(loads, devices, slots, leftovers=True):
    share = sum(loads) // devices
    left = dict(enumerate(loads))
    plan = []
    for _ in range(devices):
        device, free = {}, share
        while free and len(device) < slots and left:
            expert = max(left, key=lambda e: left[e])
            device[expert] = min(free, left[expert])
            free -= device[expert]
            left[expert] -= device[expert]
            if not left[expert]:
                del left[expert]
        plan.append(device)
    for expert, load in left.items() if leftovers else ():
        device = min(plan, key=len)
        device[expert] = device.get(expert, 0) + load
    return plan


@copies.mutant(
    "You fill a device with the largest experts, and in the end some have no place. Often one large expert is enough "
    "for a share, so slots stay empty that the small experts need: each device has to finish `slots - 1` experts."
)
def largest_first_until_full(loads, devices, slots):
    return largest_first(loads, devices, slots, leftovers=False)


@copies.mutant(
    "You cut the smallest expert of a group. The others can hold more than a share without it. Cut the largest: "
    "without it the group holds less than a share."
)
def cuts_the_smallest(loads, devices, slots):
    return spread(loads, devices, slots, cuts=0, least=-sum(loads))


@copies.mutant(
    "What is left of the expert that you cut is lost. It goes back among the others, and other devices take it."
)
def rest_is_lost(loads, devices, slots):
    return spread(loads, devices, slots, rests=False)


@copies.mutant(
    "You pair the `slots - 1` smallest experts with the largest. With two slots that's right. With more, they can "
    "hold less than a share together."
)
def smallest_and_largest(loads, devices, slots):
    share = sum(loads) // devices
    left = [(load, expert) for expert, load in enumerate(loads)]
    plan = []
    for more in reversed(range(devices)):
        left = sorted(left + ((more + 1) * (slots - 1) + 1 - len(left)) * [(0, -1)])
        whole, (load, cut) = left[: slots - 1], left[-1]
        part = min(load, share - sum(x for x, _ in whole))
        plan.append({expert: x for x, expert in [*whole, (part, cut)] if expert >= 0})
        left = left[slots - 1 : -1] + ([(load - part, cut)] if load > part else [])
    return plan


@copies.mutant(
    "You give each free slot to the expert whose copies are busiest, and split its tokens evenly among its copies. "
    "That gets close to even loads. But here the copies may get different parts, and then loads can be equal exactly."
)
def equal_copies(loads, devices, slots):
    number = [1] * len(loads)
    for _ in range(devices * slots - len(loads)):
        possible = [e for e in range(len(loads)) if number[e] < devices]
        if possible:
            number[max(possible, key=lambda e: loads[e] / number[e])] += 1
    parts = [
        (load // number[e] + (i < load % number[e]), e)
        for e, load in enumerate(loads)
        for i in range(number[e])
    ]
    plan = [{} for _ in range(devices)]
    for part, expert in sorted(parts, key=lambda x: -x[0]):
        fit = [device for device in plan if expert not in device and len(device) < slots]
        device = min(fit or plan, key=lambda device: sum(device.values()))
        device[expert] = device.get(expert, 0) + part
    return plan


@copies.mutant(
    "You forget experts without tokens. They need a slot on some device: the next batch may send them some."
)
def idle_forgotten(loads, devices, slots):
    return [
        {expert: tokens for expert, tokens in device.items() if tokens}
        for device in spread(loads, devices, slots)
    ]


@copies.mutant(
    "You look only at full groups of `slots` experts. Once there are fewer experts than that, or more slots than "
    "needed, you find none. Fill the order up with empty experts."
)
def no_empty_experts(loads, devices, slots):
    return spread(loads, devices, slots, pad=False)


@copies.mutant(
    "A group of `slots` neighbours holds more than a share without its largest, which gets what is left: less than 0. "
    "With fewer experts than slots there is no smaller group to begin with. Fill the order up with empty experts."
)
def less_than_nothing(loads, devices, slots):
    return spread(loads, devices, slots, pad=False, least=-sum(loads))


@copies.mutant(
    "You split tokens into fractions. An expert gets whole tokens on each device; use `//` and give the remainder to "
    "one of them."
)
def fractions_of_tokens(loads, devices, slots):
    plan = spread(loads, devices, slots)
    return [{expert: float(tokens) for expert, tokens in device.items()} for device in plan]


@copies.mutant(
    "You drop the tokens that remain when an expert's load isn't a multiple of its copies."
)
def remainders_dropped(loads, devices, slots):
    plan = spread(loads, devices, slots)
    number = [sum(expert in device for device in plan) for expert in range(len(loads))]
    return [{expert: loads[expert] // number[expert] for expert in device} for device in plan]


@copies.mutant(
    "You return a dict for each expert, with its devices. The statement asks for one for each device, with "
    "its experts."
)
def by_expert(loads, devices, slots):
    plan = spread(loads, devices, slots)
    return [
        {d: device[expert] for d, device in enumerate(plan) if expert in device}
        for expert in range(len(loads))
    ]
