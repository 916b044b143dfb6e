"""What a step minimises: the likelihood of text, or how clearly a model prefers one answer to another.

Chapters: 6.
"""

from collections.abc import Iterator
from typing import Literal

from minitext.config.section import Section, setting


class LanguageModelConfig(Section):
    """Cross-entropy of the targets, in pretraining and in supervised fine-tuning."""

    kind: Literal["lm"] = setting("lm", "language modelling")


class PreferenceConfig(Section):
    """Losses on pairs of a chosen and a rejected answer to one prompt."""

    kind: Literal["preference"] = setting("preference", "preferences between two answers")
    loss: Literal["dpo", "ipo", "orpo", "simpo"] = setting(
        "dpo", "dpo and ipo compare with the model that training starts from; orpo and simpo don't"
    )
    beta: float = setting(0.1, "weight of a log-ratio; of the odds ratio in orpo", gt=0, le=1e3)
    label_smoothing: float = setting(
        0.0, "dpo: share of the pairs whose labels are taken to be wrong", ge=0, lt=0.5
    )
    margin: float = setting(0.0, "simpo: reward by which the chosen answer should lead", ge=0)

    def problems(self) -> Iterator[str]:
        """Checks that every setting has an effect."""
        for name, loss in (("label_smoothing", "dpo"), ("margin", "simpo")):
            value = getattr(self, name)
            if value and self.loss != loss:
                yield (
                    f"objective.{name}={value} has no effect with objective.loss={self.loss}: leave it out, or set "
                    f"objective.loss={loss}"
                )
