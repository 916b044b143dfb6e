"""YAML from others: what it holds, or in a few words why it can't be used."""

import time
import tracemalloc

import pytest

from minitext.config import yaml_text


def bomb(write):
    return "\n".join(
        ["a: &a {x: 1}"] + [write(b, a) for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    )


REFUSED = {
    "a bomb of lists": (bomb(lambda b, a: f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]"), "20,000 values"),
    "a bomb of mappings": (
        bomb(lambda b, a: f"{b}: &{b} {{{', '.join(f'k{i}: *{a}' for i in range(9))}}}"),
        "20,000 values",
    ),
    "a bomb of merges": (
        bomb(lambda b, a: f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}], {b}: 1}}"),
        "20,000 values",
    ),
    "an alias in itself": ("&a [*a]", "an alias contains itself"),
    "deep": ("[" * 3000 + "]" * 3000, "is nested too deep"),
    "21 levels": ("[" * 21 + "]" * 21, "20 levels are the limit"),
    "a key twice": ("train: {steps: 3}\ntrain: {seed: 4}", "has the key train twice (again in line 2)"),
    "an inner key twice": ("train: {steps: 3, steps: 4}", "has the key steps twice"),
    "code": ("!!python/object/apply:os.system [ls]", "python/object/apply:os.system is not a type"),
    "two documents": ("a: 1\n---\na: 2", "line 2: found another document"),
    "half": ("a: [1,", "expected the node content, but found the end"),
    "a tab": ("a:\n\tb: 1", r"line 2: found character '\t'"),
    "a list as key": ("{[a]: 1}", "found unhashable key"),
    "too many digits": ("9" * 5000, "4300 digits"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_texts_are_refused_before_memory_is_taken(case):
    text, said = REFUSED[case]
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(yaml_text.BadYAML) as error:
        yaml_text.parse(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert said in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 150
    assert time.process_time() - began < 2 and peak < 32 << 20


def test_what_is_not_hostile_is_read():
    assert yaml_text.parse("") is None and yaml_text.parse("# nothing") is None
    assert yaml_text.parse("a: &a {b: 1}\nc: {<<: *a, d: [1, null, x]}") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": [1, None, "x"]},
    }
    assert yaml_text.parse("run: {name: 2020-13-45}") == {"run": {"name": "2020-13-45"}}
    # What is merged in may be replaced, and MaxText's files may have a key twice.
    assert yaml_text.parse("{<<: {a: 1}, a: 2}") == {"a": 2}
    assert yaml_text.parse("a: 1\na: 2", unique=False) == {"a": 2}
