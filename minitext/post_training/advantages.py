"""How much better an answer, or a token of it, was than expected.

GRPO compares the answers to one prompt with each other (Shao et al. 2024, https://arxiv.org/abs/2402.03300). PPO asks a
value head what it expected, token by token (Schulman et al. 2015, https://arxiv.org/abs/1506.02438).

Chapters: 26.
"""

import numpy as np

EPS = 1e-4  # added to a group's standard deviation


def group_advantages(rewards_N: np.ndarray, group: int, *, divide: bool = True) -> np.ndarray:
    """Returns each answer's reward minus the mean of its group, in units of the group's standard deviation.

    Answers that were all rewarded alike have the advantage 0: they teach nothing.

    Args:
      rewards_N: [N] float, the answers of a group one after another.
      group: answers in a group; it divides N.
      divide: by the standard deviation (of a sample, with N - 1). Dr. GRPO doesn't, because that gives more weight to
        prompts that are almost always or almost never answered well (Liu et al. 2025, https://arxiv.org/abs/2503.20783).

    Returns:
      [N] float64.
    """
    rewards_PG = np.asarray(rewards_N, np.float64).reshape(-1, group)
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    # The mean of equal numbers may be off by a rounding, which a division would make large.
    centred_PG[no_signal(rewards_N, group)] = 0.0
    if divide:
        centred_PG /= rewards_PG.std(axis=1, ddof=1, keepdims=True) + EPS
    return centred_PG.reshape(-1)


def no_signal(rewards_N: np.ndarray, group: int) -> np.ndarray:
    """Returns for each group whether all its answers have the same reward: [N / group] bool."""
    rewards_PG = np.asarray(rewards_N).reshape(-1, group)
    return (rewards_PG == rewards_PG[:, :1]).all(axis=1)


def generalized_advantages(
    rewards_BT: np.ndarray,
    values_BT: np.ndarray,
    mask_BT: np.ndarray,
    *,
    discount: float,
    decay: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns generalized advantage estimates, and the returns that the values should have been.

    With the surprise d_t = r_t + discount * V_(t+1) - V_t, the advantage is A_t = d_t + discount * decay * A_(t+1),
    where t + 1 is the next token of the answer. After an answer's last token both V and A are 0. Source: Schulman et
    al. 2015, equation 16.

    Args:
      rewards_BT: [B, T] reward for the token at each position.
      values_BT: [B, T] what was expected before that token: the sum of its reward and the later ones.
      mask_BT: [B, T] whether the token is the model's own; others (prompts, padding) are passed over. A row has one
        answer.
      discount: gamma, the weight of a reward one token later.
      decay: lambda; 0 trusts the values, 1 trusts the rewards.

    Returns:
      Advantages and returns (advantages + values), both [B, T] float32 and 0 outside the mask.
    """
    B, T = rewards_BT.shape
    advantages_BT = np.zeros((B, T))
    later_value_B, later_B = np.zeros(B), np.zeros(B)
    for t in reversed(range(T)):
        own_B = mask_BT[:, t] != 0
        surprise_B = rewards_BT[:, t] + discount * later_value_B - values_BT[:, t]
        found_B = surprise_B + discount * decay * later_B
        advantages_BT[own_B, t] = found_B[own_B]
        later_B = np.where(own_B, found_B, later_B)
        later_value_B = np.where(own_B, values_BT[:, t], later_value_B)
    returns_BT = np.where(mask_BT != 0, advantages_BT + values_BT, 0.0)
    return advantages_BT.astype(np.float32), returns_BT.astype(np.float32)


def whiten(x_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """Returns numbers shifted and scaled to mean 0 and variance 1 where the mask isn't 0, and 0 elsewhere."""
    real = mask_BT != 0
    found = x_BT[real].astype(np.float64)
    scaled = (found - found.mean()) / (found.std() + EPS) if found.size else found
    whole = np.zeros(x_BT.shape, np.float32)
    whole[real] = scaled
    return whole
