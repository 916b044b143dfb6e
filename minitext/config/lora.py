"""Adapters of low rank beside a model's weights, which stay as they are.

Chapters: 26.
"""

import re
from collections.abc import Iterator

from minitext.config.section import Section, setting


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained, and `checkpoint.load_parameters` has the rest."""

    rank: int = setting(0, "width of the adapters (r); 0: none, and all weights are trained", ge=0)
    alpha: float = setting(16.0, "what adapters add is multiplied by alpha / rank", gt=0)
    modules: str = setting(
        ".*/(attention|ffn)/.*",
        "a regular expression for the whole paths of projections that have adapters",
    )

    def problems(self) -> Iterator[str]:
        """Checks the regular expression."""
        try:
            re.compile(self.modules)
        except re.error as error:
            yield (
                f"model.lora.modules={self.modules} is not a regular expression ({error}): write one such as "
                "blocks/attention/.*"
            )

    @property
    def scale(self) -> float:
        """The factor on what adapters add."""
        return self.alpha / self.rank
