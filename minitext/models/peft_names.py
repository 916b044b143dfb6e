"""Names of adapters in the files of Hugging Face's peft: those of the projections beside which they stand.

peft stores A as [r, D] and B as [F, r], where a projection is [F, D].

Chapters: 26.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from minitext.config.lora import LoraConfig
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.models import families
from minitext.models.convert import KEEP, TRANSPOSED, Row, Table
from minitext.models.lora import without_lora

PREFIX = "base_model.model."
# Settings of adapters that compute something else, with the values that don't. Some ways to initialize adapters, such
# as PiSSA, change the weights beside them.
PLAIN: dict[str, Any] = {
    "use_dora": (False, None), "bias": ("none", None), "modules_to_save": (None, []), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "fan_in_fan_out": (False, None), "layers_to_transform": (None, []),
    "lora_bias": (False, None), "layer_replication": (None, []), "target_parameters": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"), "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False), "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
}  # fmt: skip


def plain(model: ModelConfig) -> ModelConfig:
    """Returns the model without adapters and with float32 weights, which others have names for."""
    return without_lora(model).model_copy(update={"storage": ()})


def _projections(model: ModelConfig, family: str) -> dict[str, Row]:
    """Returns the rows of projections that are one tensor each, by our module's path."""
    rows = families.table(plain(model), family).rows
    count = {row.path: 0 for row in rows}
    for row in rows:
        count[row.path] += 1
    return {
        row.path.removesuffix(".w").replace(".", "/"): row
        for row in rows
        if row.path.endswith(".w") and row.name.endswith(".weight") and count[row.path] == 1
        and row.view == TRANSPOSED and row.into == KEEP and not row.experts
    }  # fmt: skip


def table(model: ModelConfig, family: str) -> Table:
    """Returns the names of the adapters of a model, for `convert.load` and `convert.values`.

    Raises:
      UserError: for an adapter of a projection that the family stores together with others, or in another order.
    """
    known, rows = _projections(model, family), []
    adapted = {p.rsplit(".", 2)[0] for p in families.parameter_paths(model) if ".adapter." in p}
    for module in sorted(adapted):
        row = known.get(module.replace(".", "/"))
        if row is None:
            raise UserError(
                f"{family} has no tensor for {module.replace('.', '/')} alone, which has an adapter: export the model "
                "with its adapters merged (minitext export --format hf)"
            )
        theirs = PREFIX + row.name.removesuffix("weight")
        for ours, name in (("a", "lora_A"), ("b", "lora_B")):
            path = f"{module}.adapter.{ours}"
            rows.append(Row(f"{theirs}{name}.weight", path, TRANSPOSED, layers=row.layers))
    return Table(tuple(rows))


def describe(model: ModelConfig, family: str) -> dict[str, Any]:
    """Returns the adapter_config.json of a model's adapters."""
    names = [name for row in table(model, family).rows for _, name in row.sources()]
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names}
    others = {
        name.removesuffix(".weight")
        for row in _projections(model, family).values()
        for _, name in row.sources()
    } - modules
    last = {name.rpartition(".")[2] for name in modules}
    # The last part of a name stands for all modules that end so, if all of these have adapters.
    short = not last & {name.rpartition(".")[2] for name in others}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": model.lora.rank, "lora_alpha": model.lora.alpha,
        "target_modules": sorted(last if short else modules), "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "base_model_name_or_path": None, "use_rslora": False,
        "use_dora": False, "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip


def lora_config(
    values: Mapping[str, Any], names: Iterable[str], model: ModelConfig, family: str
) -> LoraConfig:
    """Returns the settings of adapters in peft's format.

    Args:
      values: their adapter_config.json.
      names: of their tensors.
      model: the model that they are for.
      family: its names.

    Raises:
      UserError: for adapters of another kind, or of no projection of the model.
    """
    if values.get("peft_type") != "LORA":
        raise UserError(f"peft_type={json.dumps(values.get('peft_type'))}: only LORA is read")
    for key, allowed in PLAIN.items():
        if key in values and values[key] not in allowed:
            raise UserError(f"{key}={json.dumps(values[key])[:60]}: adapters with it are not read")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and alpha > 0):
        raise UserError(
            f"r={str(rank)[:20]} and lora_alpha={str(alpha)[:20]}: two positive numbers were expected"
        )
    found = set(names)
    modules = [
        path
        for path, row in _projections(model, family).items()
        if any(
            PREFIX + n.removesuffix("weight") + "lora_A.weight" in found for _, n in row.sources()
        )
    ]
    if not modules:
        raise UserError(
            "none of the adapters is of a projection of the model: they are for another one"
        )
    # With rslora the factor is alpha / sqrt(r).
    factor = rank**0.5 if values.get("use_rslora") else 1.0
    return LoraConfig(rank=rank, alpha=alpha * factor, modules="|".join(map(re.escape, modules)))
