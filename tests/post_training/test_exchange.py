"""Each process answers its share of the prompts; tests/post_training/test_reinforce.py runs two of them."""

from itertools import chain

import jax
import numpy as np
import pytest

from minitext.post_training.exchange import exchange, share_of
from minitext.post_training.reward_workers import Rewarded
from minitext.post_training.sampler import Answer


def test_one_process_has_everything():
    answers = [[Answer((1, 2), np.zeros(2, np.float32), True)]]
    rewarded = Rewarded(np.ones((1, 1)), np.zeros(1, bool), "")
    found = exchange(answers, rewarded, 1)
    assert found[0] is answers and found[1] is rewarded


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_shares_are_all_prompts_in_order_and_about_equal(count, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    shares = []
    for index in range(3):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        shares.append(range(count)[share_of(count)])
    assert list(chain(*shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
