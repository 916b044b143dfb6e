"""What an exception that an answer raised is usually about, in a sentence or two for the learner."""

import re

NOTHING = "Your answer returns None: some way through it ends without a `return` of a value."
INSIDE = "There is None where the statement asks for a value: within your answer's result, or from one of its methods."
RESULT = "Your answer's result is of another kind than the statement asks for"
KERNEL = "Your kernel runs as it's simulated, but the compiler refuses it"
# (type, what its message has, what to say): the first row that fits is used.
_CAUSES = (
    (
        "TracerBoolConversionError",
        "",
        "Python's `if`, `while`, `and`, `or` and `not` need a value, but in a traced function an array has only a "
        "shape and a dtype. Compute both cases and choose with `jnp.where`, or use `jax.lax.cond`.",
    ),
    (
        "TracerArrayConversionError",
        "",
        "You hand a traced array to NumPy, which needs its values. Use the function of `jnp`.",
    ),
    (
        "TracerIntegerConversionError|ConcretizationTypeError",
        "",
        "You use a traced value where Python needs a number: as a size, in `range`, or in `int(...)`. Sizes come "
        "from shapes.",
    ),
    (
        "NonConcreteBooleanIndexError",
        "",
        "You select with a boolean array in a traced function: the result's size would depend on its values. Use "
        "`jnp.where`, or set the others to a neutral value.",
    ),
    (
        "UnexpectedTracerError",
        "",
        "A traced value has left its function, in a list or an attribute. Return it instead.",
    ),
    (
        "TypeError",
        "carry",
        "A loop's state must keep its structure, shapes and dtypes from one turn to the next. Compare what goes "
        "into your loop's body with what comes out.",
    ),
    (
        "TypeError",
        "JAX arrays are immutable|does not support item assignment",
        "You assign to an entry of something that can't be changed. For a JAX array, `x.at[i].set(v)` returns a "
        "new one; use its result.",
    ),
    (
        "TypeError",
        "Gradient only defined for scalar-output",
        "`jax.grad` takes the derivative of a function whose result is a single number, and this one returns an array. "
        "For many results there are `jax.jacrev`, `jax.vjp` and `jax.jvp`.",
    ),
    (
        "TypeError",
        "JSON serializable",
        "JSON holds dicts, lists, strings, bools, None and Python's own numbers. Arrays and NumPy's numbers must be "
        "converted.",
    ),
    (
        "TypeError",
        "unhashable",
        "A list, a dict or an array can't be in a set or the key of a dict. Make it a tuple.",
    ),
    (
        "TypeError",
        r"positional argument|unexpected keyword|required keyword",
        "A function is called with other arguments than it has. The names and the order in the stub are those that "
        "the checks use.",
    ),
    (
        "TypeError|AttributeError",
        "NoneType",
        "Something is None where you use it: a function that returns nothing, or an argument that may be None.",
    ),
    (
        "TypeError|ValueError",
        r"[Ii]ncompatible shapes|broadcast|contracting dimension|matmul|dot_general|size mismatch|einsum|"
        r"operands? could not",
        "Two shapes don't fit. Write down the shapes of both operands in this line, and which axis belongs to which.",
    ),
    (
        "ValueError",
        "values to unpack",
        "You unpack another number of values than there are.",
    ),
    (
        "ValueError",
        r"empty|zero-size",
        "A list or an array is empty here, and has neither a smallest nor a largest entry. Treat that case first.",
    ),
    (
        "ValueError",
        "truth value",
        "You use an array as a condition. Compare its entries, and say whether all of them or any must hold.",
    ),
    (
        "ZeroDivisionError",
        "",
        "You divide by something that is 0 in this case. Which of your numbers can become 0?",
    ),
    (
        "OverflowError|ValueError",
        "infinity|NaN",
        "A number becomes infinite or NaN, and can't be made an int. Which division or logarithm is it?",
    ),
    (
        "IndexError",
        "",
        "You look past the end: in this case there are fewer entries than your index needs.",
    ),
    (
        "KeyError",
        "",
        "You look up a key that isn't there in this case. Which keys are, and of which type? (JSON makes every key a "
        "string.)",
    ),
    (
        "UnboundLocalError|NameError",
        "",
        "A name is used before it has a value: it is assigned only in a branch that isn't taken here, or is spelt in "
        "another way.",
    ),
    (
        "StopIteration",
        "",
        "`next` finds nothing more: the iterator has ended, or no entry meets your condition.",
    ),
    (
        "RecursionError",
        "",
        "Your function calls itself without end: the case in which it should stop is never reached.",
    ),
    (
        "AttributeError",
        "",
        "The object has no such attribute: it is of another kind than you think, or the name is another.",
    ),
)


def nothing(whole: bool) -> str:
    """What to say about None in an answer's result: it's the `whole` result, or a part of it."""
    return NOTHING if whole else INSIDE


def cause(kind: str, text: str, own: bool, none: bool) -> str:
    """What to say about an exception, or "".

    Args:
        kind: the exception's type.
        text: its message.
        own: whether a line of the answer raised it; or else a check, with what the answer returned.
        none: whether the answer returned None.
    """
    if not own:
        if "NoneType" in text:
            return nothing(none)
        if re.search("Pallas|Mosaic", text):
            return f"{KERNEL}: {text.rstrip('.')}."
        kinds = ("TypeError", "AttributeError", "KeyError", "IndexError", "ValueError")
        return f"{RESULT}: {text.rstrip('.')}." if kind in kinds else ""
    for kinds, pattern, said in _CAUSES:
        if kind in kinds.split("|") and re.search(pattern, text):
            return said
    return ""
