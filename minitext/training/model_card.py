"""Model cards: what an exported model is, what it learned from and how well, and the commands that run it.

A card is a README.md as the Hugging Face Hub reads it: YAML between two lines of dashes, then Markdown. All of it comes
from the run directory. What that doesn't say is unknown, and so is the licence, unless the exporter names it. Paths
are shortened to their last names, because cards get published.

Source: Mitchell et al. 2019, "Model Cards for Model Reporting" (arXiv 1810.03993).
"""

import collections
import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import yaml

from minitext.config.config import Config, load_config
from minitext.models.flops import count_params
from minitext.observability.metrics import read_json_lines, read_metrics
from minitext.terminal import show_bytes

CARD, UNKNOWN, EVALUATIONS = "README.md", "unknown", "evaluations.jsonl"
LIBRARIES = {
    "hf": "transformers",
    "peft": "peft",
    "onnx": "onnx",
}  # by format, as the Hub calls them

# How to run each format, in its folder.
COMMANDS = {
    "orbax": """minitext reads the folder as a run:

```bash
minitext generate . --prompt "the "
```""",
    "hf": """transformers reads the folder (`pip install transformers torch`):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")
tokens = tokenizer("the ", return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```""",
    "peft": """The folder holds adapters alone. peft (`pip install peft`) adds them to the
model that they were trained beside, here called BASE:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), ".")
```""",
    "onnx": """onnxruntime (`pip install onnxruntime tokenizers`) computes the logits of texts:

```python
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

session = onnxruntime.InferenceSession("model.onnx")
tokenizer = Tokenizer.from_file("tokenizer.json")
tokens = tokenizer.encode("the ").ids
for _ in range(20):  # without a cache: each token reads the whole text again
    (logits,) = session.run(None, {"tokens": np.array([tokens], np.int32)})
    tokens.append(int(logits[0, -1].argmax()))
print(tokenizer.decode(tokens))
```""",
    "stablehlo": """The folder holds programs and weights, which JAX runs without the code that made them:

```bash
pip install jax flatbuffers
python generate.py --tokens 1,2,3 --max-tokens 20
```

From Python, `load` checks every file against `manifest.json`, this one too, before anything runs:

```python
from load import load

manifest, functions = load(".")
print(manifest["functions"]["prefill"]["inputs"])
```""",
}


def card(
    directory: Path | str,
    cfg: Config,
    step: int,
    *,
    form: str,
    size: int,
    dtype: str,
    licence: str = UNKNOWN,
) -> str:
    """Returns the model card of a run that is exported.

    Args:
      directory: the run.
      cfg: the configuration of what is exported.
      step: of the parameters.
      form: the format, one of `COMMANDS`.
      size: of the weights, in bytes.
      dtype: of the weights.
      licence: under which the model may be used.
    """
    name = Path(directory).resolve().name
    front = {
        "license": licence, "library_name": LIBRARIES.get(form, "minitext"),
        "pipeline_tag": "text-generation", "tags": ["minitext", "jax", form],
    }  # fmt: skip
    rows = {
        **_model_rows(cfg, size, dtype), **_training_rows(Path(directory), cfg, step), "Licence": licence,
        "Exported": f"{datetime.date.today().isoformat()} by minitext {metadata.version('minitext')}, as {form}",
    }  # fmt: skip
    table = "\n".join(f"| {_cell(title)} | {_cell(value)} |" for title, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {_cell(name)}\n\n"
        f"| | |\n|---|---|\n{table}\n\n## How to run it, in this folder\n\n{COMMANDS[form]}\n"
    )


def measure(params: Any) -> tuple[int, str]:
    """Returns the bytes of a pytree of arrays, and their types."""
    leaves = jax.tree.leaves(params)
    sizes = collections.Counter()
    for x in leaves:
        sizes[x.dtype.name] += x.nbytes
    return sizes.total(), ", ".join(name for name, _ in sizes.most_common())


def keep_evaluation(directory: Path | str, step: int, what: str, found: Mapping[str, Any]) -> None:
    """Adds what `minitext eval` measured to a run directory, for its model cards; not to one that can't be written.

    Args:
      directory: the run.
      step: of the parameters.
      what: the data or the task.
      found: numbers by name; what is no number isn't kept.
    """
    numbers = {name: x for name, x in found.items() if _is_number(x) and name != "step"}
    record = {"date": datetime.date.today().isoformat(), "step": step, "what": what, **numbers}
    with (
        contextlib.suppress(OSError),
        (Path(directory) / EVALUATIONS).open("a", encoding="utf-8") as file,
    ):
        file.write(json.dumps(record) + "\n")


def _model_rows(cfg: Config, size: int, dtype: str) -> dict[str, str]:
    model = cfg.model
    whole, active = count_params(model), count_params(model, active=True)
    used = f", {active:,} of them active for a token" if active < whole else ""
    layers = f"{model.layers} layers of {model.embed} features, {model.heads} heads"
    return {
        "Model": f"decoder-only transformer, {layers}, attention {model.attention.kind}, feed-forward {model.ffn.kind}",
        "Parameters": f"{whole:,}{used}",
        "Weights": f"{show_bytes(size)} ({size:,} bytes), {dtype}; computes in {model.dtype}",
        "Vocabulary": f"{model.vocab:,} tokens",
    }


def _training_rows(directory: Path, cfg: Config, step: int) -> dict[str, str]:
    records = [r for r in read_metrics(directory) if r["step"] <= step]
    trained = bool(records)
    tokens = sum(r["tokens"] for r in records if _is_number(r.get("tokens")))
    # Merged adapters are no longer beside another run's weights, which the run's own configuration still names.
    own = load_config(None, [f"config={directory / 'config.yml'}"]).checkpoint
    source, objective = own.load_parameters or own.load_full_state, cfg.objective
    unit = " nats/token" if objective.kind == "lm" else ""
    return {
        "Training data": _data(cfg) if trained else UNKNOWN,
        "Objective": objective.kind if trained else UNKNOWN,
        "Began from": Path(source).name if source else "random weights" if trained else UNKNOWN,
        "Length of texts": f"{cfg.data.seq_len:,} tokens" if trained else UNKNOWN,
        "Steps": f"{step:,} of {cfg.train.steps:,}" if trained else UNKNOWN,
        "Tokens seen": f"{tokens:,.0f} targets" if trained else UNKNOWN,
        "Loss in training": _last(records, "loss", unit),
        "Loss in validation": _last(records, "val_loss", unit),
        "Evaluation": _evaluations(directory, step),
    }  # fmt: skip


def _data(cfg: Config) -> str:
    data = cfg.data
    if data.source == "mixture":
        parts = (f"{p.weight:g} {_named(p.source, p.path, p.tfds_name)}" for p in data.mixture)
        return f"mixture: {', '.join(parts)}"
    return _named(data.source, data.path, data.hf_name or data.tfds_name)


def _named(source: str, path: str | None, published: str | None) -> str:
    known = {
        "stdlib": "source text of Python's standard library (stdlib)",
        "grammar": "a synthetic grammar (grammar)",
    }
    more = [*([Path(path).name] if path else []), *([published] if published else [])]
    return f"{known.get(source, source)}{': ' if more else ''}{', '.join(more)}"


def _last(records: Sequence[Mapping[str, Any]], key: str, unit: str) -> str:
    """Returns the last value of a loss, and its step."""
    found = [r for r in records if _is_number(r.get(key))]
    return f"{found[-1][key]:.4f}{unit} at step {found[-1]['step']:,}" if found else UNKNOWN


def _evaluations(directory: Path, step: int) -> str:
    """Returns what was measured of this step; of the same data or task the newest counts."""
    found = {}
    for record in read_json_lines(directory / EVALUATIONS):
        if record.get("step") == step:
            found[str(record.get("what"))] = record
    return "; ".join(f"{what}: {_numbers(r)}" for what, r in found.items()) or (
        f"{UNKNOWN}: minitext eval did not measure it"
    )


def _numbers(record: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {x:.6g}" for name, x in record.items() if _is_number(x) and name != "step"
    )


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _cell(text: str) -> str:
    """Returns a text that can't end a cell of a table, or a heading."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
