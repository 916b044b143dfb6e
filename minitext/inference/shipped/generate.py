"""Continues texts with the artefact in this folder: python generate.py --tokens 1,2,3:4,5 --max-tokens 20."""

import argparse
from pathlib import Path

import numpy as np

BUCKET = 64  # lengths are rounded up to a multiple of this, since each length is compiled


def generate(manifest, functions, prompts, max_tokens):
    """Yields the most likely next token of each prompt, [B] int32, `max_tokens` times; prompts are lists of tokens.

    Raises ValueError for a prompt without tokens, a token that the model doesn't have, and more tokens than it takes.
    """
    longest, limit = max(map(len, prompts)), manifest["text"]["max_length"]
    if not all(prompts) or not 0 < max_tokens <= limit - longest:
        raise ValueError(f"{longest} + {max_tokens} tokens: at least 1 + 1 and at most {limit}")
    known = range(manifest["text"]["vocabulary"])
    if unknown := [token for prompt in prompts for token in prompt if token not in known]:
        raise ValueError(f"there is no token {unknown[0]}: the model has 0 to {known[-1]}")
    sizes: dict = {"b": len(prompts)}
    for symbol, length in (("t", longest), ("s", longest + max_tokens)):
        sizes[symbol] = min(-(-length // BUCKET) * BUCKET, limit)
    inputs = {
        name: np.zeros([sizes.get(d, d) for d in x["shape"]], x["dtype"])
        for name, x in manifest["functions"]["prefill"]["inputs"].items()
    }
    for row, prompt in enumerate(prompts):
        inputs["tokens"][row, : len(prompt)] = prompt
        inputs["lengths"][row] = len(prompt)
    lengths, outputs = inputs["lengths"], functions["prefill"](inputs)
    for step in range(max_tokens):
        tokens = np.argmax(outputs.pop("logits"), axis=-1).astype(np.int32)
        yield tokens
        if step + 1 < max_tokens:
            outputs = functions["decode"]({"tokens": tokens, "lengths": lengths + step, **outputs})


if __name__ == "__main__":
    from load import Refused, load

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", required=True, help="of a prompt, or of several: 1,2,3:4,5")
    parser.add_argument("--max-tokens", type=int, default=20)
    words = parser.parse_args()
    try:
        prompts = [[int(token) for token in row.split(",")] for row in words.tokens.split(":")]
        steps = [*generate(*load(Path(__file__).parent), prompts, words.max_tokens)]
        print("\n".join(",".join(map(str, row)) for row in np.stack(steps, axis=1)))
    except (Refused, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
