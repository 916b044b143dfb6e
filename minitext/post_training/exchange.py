"""Answers and rewards that several processes drew and computed, each its share, given to all of them.

Chapters: 26.
"""

import io

import jax
import numpy as np

from minitext.post_training.reward_workers import Rewarded
from minitext.post_training.sampler import Answer
from minitext.sharding.transfer import share_bytes


def share_of(count: int) -> slice:
    """Returns which of `count` prompts are this process's; the shares follow one another in the processes' order."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def exchange(
    answers: list[list[Answer]], rewarded: Rewarded, n: int
) -> tuple[list[list[Answer]], Rewarded]:
    """Returns what all processes have, in the order of `share_of`. All processes make the call.

    Args:
      answers: this process's groups of `n` answers.
      rewarded: their rewards.
      n: answers to a prompt.
    """
    if jax.process_count() == 1:
        return answers, rewarded
    file, flat = io.BytesIO(), [answer for group in answers for answer in group]
    np.savez(
        file,
        length=np.asarray([len(answer.tokens) for answer in flat], np.int64),
        tokens=np.asarray([token for answer in flat for token in answer.tokens], np.int32),
        logp=np.concatenate([np.zeros(0, np.float32), *(answer.logp for answer in flat)]),
        ended=np.asarray([answer.ended for answer in flat], bool),
        values=rewarded.values,
        failed=rewarded.failed,
        why=np.asarray(rewarded.why),
    )
    found: list[Answer] = []
    theirs = [
        np.load(io.BytesIO(data), allow_pickle=False) for data in share_bytes(file.getvalue())
    ]
    for part in theirs:
        ends = np.cumsum(part["length"])[:-1]
        tokens, logp = (np.split(part[name], ends) for name in ("tokens", "logp"))
        for row, ended in enumerate(part["ended"]):
            found.append(Answer(tuple(tokens[row].tolist()), logp[row], bool(ended)))
    whole = Rewarded(
        np.concatenate([part["values"] for part in theirs]),
        np.concatenate([part["failed"] for part in theirs]),
        next((why for part in theirs if (why := str(part["why"]))), ""),
    )
    return [found[at : at + n] for at in range(0, len(found), n)], whole
