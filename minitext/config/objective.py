"""What a step minimises: the likelihood of text, or how clearly a model prefers one answer to another.

Chapters: 6, 26.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

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


class RewardPart(Section):
    """One reward, and its weight in the sum."""

    name: str = Field(description="a reward by name, or FILE.py:FUNCTION")
    weight: float = setting(1.0, "factor of the reward; 0: it is measured only")
    argument: str | None = setting(None, "third argument of the function, such as a pattern")


class RolloutConfig(Section):
    """What reinforcement learning from the model's own answers has in common."""

    rewards: tuple[RewardPart, ...] = setting(
        (RewardPart(name="exact"),),
        "parts of the reward such as [{name: exact}, {name: length, weight: 0.1, argument: '200'}]",
        min_length=1,
    )
    reward_seconds: float = setting(5.0, "time for the rewards of an answer", gt=0, le=1e6)
    failed_reward: float = setting(
        0.0, "reward of an answer whose reward takes longer, raises or crashes"
    )
    prompts: int = setting(32, "prompts that are answered with the same parameters", ge=1)
    group: int = setting(8, "answers to each prompt", ge=1, le=128)
    iterations: int = setting(1, "times that all these answers are trained on", ge=1)
    temperature: float = setting(
        1.0, "divides the logits, in answering and in training", ge=1e-3, le=1e3
    )
    max_tokens: int = setting(64, "tokens of an answer, its end included", ge=1)
    overlong: int = setting(
        0, "last of these tokens, over which a penalty grows to 1 (DAPO); 0: none", ge=0
    )
    clip: float = setting(0.2, "the ratio of probabilities is clipped below 1 - clip", gt=0, lt=1)
    clip_high: float | None = setting(None, "and above 1 + clip_high (DAPO); null: as clip", gt=0)
    kl: float = setting(
        0.0, "weight of the divergence from the model that training starts from", ge=0
    )
    entropy: float = setting(0.0, "weight of the entropy, which is then maximised", ge=0)
    old_logp: Literal["trainer", "engine"] = setting(
        "trainer",
        "who says how likely answers were: the trainer computes them again, or the engine that drew them",
    )
    weighting: Literal["token", "sequence", "constant"] = setting(
        "sequence",
        "token: all tokens count alike; sequence: all answers; constant: a token is 1/max_tokens of an answer",
    )
    engine_devices: int = setting(
        1, "devices among which the engine splits heads and features", ge=1
    )

    @property
    def answers(self) -> int:
        """Answers that are drawn with the same parameters."""
        return self.prompts * self.group

    def problems(self) -> Iterator[str]:
        """Checks what is drawn, and that what the engine says of it can be compared."""
        if self.overlong > self.max_tokens:
            yield (
                f"objective.overlong={self.overlong} is more than objective.max_tokens={self.max_tokens}: choose "
                f"{self.max_tokens} or less"
            )
        if self.old_logp == "engine" and self.temperature != 1:
            yield (
                f"objective.old_logp=engine with objective.temperature={self.temperature}: the engine reports "
                "probabilities at temperature 1: set objective.old_logp=trainer"
            )
        if not any(part.weight for part in self.rewards):
            yield "objective.rewards has no part with a weight other than 0: give one"


class GRPOConfig(RolloutConfig):
    """Group relative policy optimization (Shao et al. 2024): answers are compared with others to the same prompt."""

    kind: Literal["grpo"] = setting(
        "grpo", "reinforcement learning, answers compared within groups"
    )
    divide_by_std: bool = setting(
        True, "divide advantages by their group's standard deviation; Dr. GRPO doesn't"
    )
    dynamic_rounds: int | None = setting(
        None,
        "drop groups without differences in reward, and draw others up to so many times (DAPO); null: keep them",
        ge=0,
    )

    def problems(self) -> Iterator[str]:
        """Checks that there are answers to compare."""
        yield from super().problems()
        if self.group < 2:
            yield (
                f"objective.group={self.group} leaves nothing to compare an answer with: set objective.group=2 or "
                "more, or objective.kind=ppo"
            )


class PPOConfig(RolloutConfig):
    """Proximal policy optimization (Schulman et al. 2017): answers are compared with what a value head expected."""

    kind: Literal["ppo"] = setting("ppo", "reinforcement learning with a value head")
    discount: float = setting(1.0, "weight of a reward one token later", gt=0, le=1)
    decay: float = setting(
        0.95, "lambda of generalized advantages: 0 trusts values, 1 rewards", ge=0, le=1
    )
    value_weight: float = setting(0.5, "weight of the values' loss", ge=0)
    value_clip: float = setting(0.2, "how far a batch may move a value", gt=0)
    whiten: bool = setting(True, "shift and scale advantages to mean 0 and variance 1")
