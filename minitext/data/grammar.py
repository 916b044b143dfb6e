"""A synthetic language with a computed entropy rate, so the loss has a known floor.

A stochastic finite automaton over bytes tells small stories:

    Once a queen lived by the sea. The gulls that the sailor sees follow the boat. She sings.

It is unifilar: the text since the start of the document determines the state. So the next token's
entropy given that text is the entropy of the state's own choice, and its average is a sum over
states. There is more to learn than which letters are neighbours: the opening sentence fixes the
pronoun and the nouns of the whole story, a verb agrees with its subject across a relative clause,
and a sentence that begins "Long ago" is in the past tense.

Sources: Shannon 1948, section 7 (https://doi.org/10.1002/j.1538-7305.1948.tb01338.x); Crutchfield
and Feldman 2003 for unifilar automata and what a reader who must find the state loses
(https://arxiv.org/abs/cond-mat/0102181).

Chapters: 7.
"""

import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal

import numpy as np

EOD = 256
DIGEST = "grammar-1"  # identifies this language: change it with anything below
VALIDATION_ROWS = 1024

Slot = Hashable
Choice = tuple[str, int, Slot]  # text, weight, next slot

END = chr(EOD)
START: Slot = "start"
PLACES = {
    "by the sea": "sailor sailors,boat boats,gull gulls,wave waves,crab crabs,storm storms",
    "in the hills": "shepherd shepherds,goat goats,wolf wolves,stone stones,hare hares,fox foxes",
}
HEROES = {"queen": "She ", "king": "He "}
ADJECTIVES = ("grey", "small", "white")
# Each verb has a form for singular subjects, one for plural ones, and the past.
AGREEMENTS = ("singular", "plural", "past")
TRANSITIVE = ("sees see saw", "follows follow followed", "finds find found", "hears hear heard")
INTRANSITIVE = ("sleeps sleep slept", "waits wait waited", "sings sing sang")
ADVERBS = ("at night.", "at dawn.", "again.", "all day.")


def slots() -> Iterator[tuple[Slot, list[Choice]]]:
    """Yields the grammar: each slot and the choices there.

    No choice is a prefix of another in its slot, so the text shows which was made.
    """
    # Every document begins alike, so its first byte, which isn't a target, carries no information.
    yield START, [(f"Once a {hero} lived ", 1, hero) for hero in HEROES]
    for hero in HEROES:
        yield hero, [(f"{place}.", 1, (hero, place, "close")) for place in PLACES]
        for place, nouns in PLACES.items():
            for slot, choices in _story(HEROES[hero], [pair.split() for pair in nouns.split(",")]):
                moves: list[Choice] = [
                    (text, weight, START if after == START else (hero, place, after))
                    for text, weight, after in choices
                ]
                yield (hero, place, slot), moves


def _story(pronoun: str, nouns: list[list[str]]) -> Iterator[tuple[Slot, list[Choice]]]:
    """Yields the slots of the sentences after the opening one, for one pronoun and set of nouns."""
    weights = [8 // (i + 1) for i in range(len(nouns))]
    named = [
        (noun, weight, number)
        for pair, weight in zip(nouns, weights, strict=True)
        for noun, number in zip(pair, AGREEMENTS, strict=False)
    ]
    yield "close", [(" ", 6, "sentence"), (END, 1, START)]
    starts: list[Choice] = [
        ("The ", 8, ("subject", "either")),
        ("A ", 3, ("subject", "singular")),
        ("Some ", 3, ("subject", "plural")),
        ("Long ago the ", 2, ("subject", "past")),
        (pronoun, 4, ("verb", "singular")),
    ]
    yield "sentence", starts
    for wanted in ("either", *AGREEMENTS):
        subjects: list[Choice] = [(f"{word} ", 3, ("subject", wanted)) for word in ADJECTIVES]
        for noun, weight, number in named:
            if wanted in ("either", "past", number):
                verb = "past" if wanted == "past" else number
                subjects.append((f"{noun} ", weight, ("predicate", verb)))
        yield ("subject", wanted), subjects
    for i, number in enumerate(AGREEMENTS):
        verbs: list[Choice] = [(f"{v.split()[i]} the ", 3, "object") for v in TRANSITIVE]
        for verb in INTRANSITIVE:
            verbs += [(f"{verb.split()[i]}.", 1, "close"), (f"{verb.split()[i]} ", 1, "adverb")]
        yield ("verb", number), verbs
        yield ("predicate", number), [*verbs, ("that the ", 6, ("clause", number))]
        # The clause has its own subject and verb; then the outer subject's verb is due.
        clause: list[Choice] = []
        for noun, weight, inner in named:
            verb = ("clause verb", number, "past" if number == "past" else inner)
            clause.append((f"{noun} ", weight, verb))
        yield ("clause", number), clause
        for j, inner in enumerate(AGREEMENTS):
            if (number == "past") == (inner == "past"):
                seen: list[Choice] = [(f"{v.split()[j]} ", 1, ("verb", number)) for v in TRANSITIVE]
                yield ("clause verb", number, inner), seen
    yield "object", [(noun + "." * (after == "close") + " " * (after == "adverb"), weight, after)
                     for noun, weight, _ in named for after in ("close", "adverb")]  # fmt: skip
    yield "adverb", [(adverb, 1, "close") for adverb in ADVERBS]


@dataclass(frozen=True)
class Automaton:
    """The grammar, letter by letter. State 0 is the start of a document.

    Attributes:
        edges: per state, token -> (chances out of 256, next state).
        visits: float64 [states], a document's expected visits to each state.
        entropy: float64 [states], nats of the choice made there.
        steps: per state, the 256 equally likely outcomes, as next state x 512 + token.
    """

    edges: list[dict[int, tuple[int, int]]]
    visits: np.ndarray
    entropy: np.ndarray
    steps: list[list[int]]


@cache
def automaton() -> Automaton:
    """Spells out the slots as one automaton, in some hundredths of a second."""
    grammar = dict(slots())
    names = list(grammar)
    root: dict[Slot, int] = {}
    edges: list[dict[int, tuple[int, int]]] = []
    reach: list[tuple[int, float]] = []  # per state, its slot and its probability from there
    arrive = np.zeros((len(names), len(names)))  # probability of going from slot to slot
    leaves: list[tuple[int, int, int, Slot]] = []

    def spell(slot: int, chance: float, choices: list[Choice]) -> int:
        state = len(edges)
        edges.append({})
        reach.append((slot, chance))
        letters = sorted({text[0] for text, _, _ in choices})
        groups = [[(t[1:], w, s) for t, w, s in choices if t[0] == letter] for letter in letters]
        shares = _out_of_256([sum(weight for _, weight, _ in group) for group in groups])
        for letter, group, share in zip(letters, groups, shares, strict=True):
            rest, _, after = group[0]
            if rest:
                edges[state][ord(letter)] = share, spell(slot, chance * share / 256, group)
            else:
                assert len(group) == 1, f"one choice of {names[slot]} begins another"
                leaves.append((state, ord(letter), share, after))
                arrive[slot, names.index(after)] += chance * share / 256
        return state

    for slot, name in enumerate(names):
        root[name] = spell(slot, 1.0, grammar[name])
    for state, token, share, after in leaves:
        edges[state][token] = share, root[after]
    assert root[START] == 0 and len(edges[0]) == 1

    # A document starts in START once, and each visit leads to the next: v = e_0 + v P.
    again = arrive.copy()
    again[:, 0] = 0  # going to START is the next document
    visits = np.linalg.solve(np.eye(len(names)) - again.T, np.eye(len(names))[0])
    entropy = [-sum(n / 256 * np.log(n / 256) for n, _ in edge.values()) for edge in edges]
    # `* n` repeats one object, so the table fits in the processor's cache.
    steps = [
        list(chain(*([after * 512 + token] * n for token, (n, after) in edge.items())))
        for edge in edges
    ]
    return Automaton(
        edges, np.array([visits[slot] * chance for slot, chance in reach]), np.array(entropy), steps
    )


def grammar_entropy_rate() -> float:
    """Returns the entropy rate of the language in nats per target token, exactly.

    It is a document's expected information over its expected number of targets: with v(s) the
    expected visits to state s (from a linear solve) and H(s) the entropy of the choice made there,

        sum over s of v(s) H(s)   /   (sum over s of v(s)  -  1).

    A document's tokens are its bytes and its end of document. The denominator leaves out the first
    byte because `packing` never makes it a target; it adds nothing to the numerator because it is
    always "O".

    Why it is a floor: `Windows` cuts rows from the stationary stream at random points. A model that
    hasn't seen a row's random numbers knows at most the state at each token, so its expected loss
    (all nats over all targets) is at least this rate, whatever its size. It stays slightly above:
    after the cut it must first infer the state, which costs some nats per row, so less per token in
    longer rows. On a few rows the loss may fall below by chance. On average only repeated training
    on the same rows could go below, and no row comes twice.
    """
    it = automaton()
    return float(it.visits @ it.entropy / (it.visits.sum() - 1))


def grammar_nll(tokens: np.ndarray) -> np.ndarray:
    """Returns the nats of each token under the automaton itself, the best possible predictor.

    Args:
        tokens: int [n], from the start of a document on; more documents may follow.

    Returns:
        float64 [n]; infinite from the first token that the language doesn't allow.
    """
    edges, state = automaton().edges, 0
    nats = np.full(len(tokens), np.inf)
    for i, token in enumerate(tokens):
        if int(token) not in edges[state]:
            break
        share, state = edges[state][int(token)]
        nats[i] = -np.log(share / 256)
    return nats


def generate(rng: np.random.Generator, length: int, state: int = 0) -> np.ndarray:
    """Draws tokens of the language, int32 [length], from a state on (0: a new document)."""
    steps, taken = automaton().steps, []
    for byte in rng.bytes(length):
        step = steps[state][byte]
        taken.append(step)
        state = step >> 9
    return np.array(taken, np.int32) & 511


@dataclass(frozen=True)
class Windows:
    """Item i is row i of the language: int32 [T + 1], a function of (seed, split, i) alone.

    A row starts like a random cut of an endless stream, in a state drawn in proportion to its
    visits. Training rows never end; validation has `VALIDATION_ROWS`.
    """

    seq_len: int
    seed: int
    split: Literal["train", "validation"]

    def __len__(self) -> int:
        return sys.maxsize if self.split == "train" else VALIDATION_ROWS

    def __getitem__(self, index: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, int(self.split == "train"), index])
        passed = np.cumsum(automaton().visits)
        state = int(np.searchsorted(passed, rng.random() * passed[-1], side="right"))
        return generate(rng, self.seq_len + 1, state)


def _out_of_256(weights: list[int]) -> list[int]:
    """Rounds weights to nonzero chances out of 256, so one random byte makes an exact choice."""
    exact = [weight * 256 / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i]):
        if sum(shares) < 256:
            shares[i] += 1
    shares[shares.index(max(shares))] += 256 - sum(shares)
    return shares
