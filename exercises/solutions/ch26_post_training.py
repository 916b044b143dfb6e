import re

import jax
import jax.numpy as jnp
import numpy as np


# EXERCISE 26.loss_mask
def answer_mask(messages, render, encode, end):
    """Tokens, targets, and which targets the assistant says.

    Args:
      messages: dicts with "role" and "content".
      render: render(messages, header) is the conversation as text. If header
        is True, the opening of an assistant's turn comes after it.
      encode: encode(text) is a list of ids and a list of (start, stop), the
        characters of each token.
      end: the text that ends a turn.

    Returns:
      (tokens, targets, mask): lists of the same length.

    Raises:
      ValueError: the template doesn't continue the messages before an
        assistant's turn with that turn and an end.
    """
    # BEGIN SOLUTION
    text = render(messages, False)
    spoken = []
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:n], True)
        after = render(messages[: n + 1], False)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the template rewrites what is before message {n}"
            )
        spoken.append((len(before), after.rindex(end, len(before)) + len(end)))
    ids, offsets = encode(text)
    said = [int(any(s < b and a < e for a, b in spoken)) for s, e in offsets]
    return ids[:-1], ids[1:], said[1:]
    # END SOLUTION


# EXERCISE 26.lora_merge
def merge(w, a, b, alpha, sign):
    """Adds an adapter to weights, or takes it out again.

    Args:
      w: [..., D, F] weights; before D there may be any dimensions.
      a: [..., D, R] and
      b: [..., R, F] the adapter, float32.
      alpha: the adapter is multiplied by alpha / R.
      sign: 1 adds it, -1 takes it out.

    Returns:
      [..., D, F] in the type of w.
    """
    # BEGIN SOLUTION
    change = jnp.einsum("...dr,...rf->...df", a, b) * (alpha / a.shape[-1])
    return (w.astype(jnp.float32) + sign * change).astype(w.dtype)
    # END SOLUTION


# EXERCISE 26.lora_rows
def lora_rows(x_BTD, w_DF, a_NDR, b_NRF, scale_N, which_B):
    """A linear layer in which each row has an adapter of its own, or none.

    Args:
      x_BTD: [B, T, D] float32.
      w_DF: [D, F] the weights of all rows.
      a_NDR: [N, D, R] and
      b_NRF: [N, R, F] the adapters that are loaded. What no row uses may hold
        anything.
      scale_N: [N] how much each counts.
      which_B: [B] int32, each row's adapter; -1 for none.

    Returns:
      [B, T, F] float32.
    """
    # BEGIN SOLUTION
    used_B11 = (which_B >= 0)[:, None, None]
    a_BDR = jnp.where(used_B11, a_NDR[which_B], 0)
    b_BRF = jnp.where(used_B11, b_NRF[which_B], 0)
    scale_B11 = jnp.where(used_B11, scale_N[which_B][:, None, None], 0)
    low_BTR = jnp.einsum("btd,bdr->btr", x_BTD, a_BDR)
    added_BTF = jnp.einsum("btr,brf->btf", low_BTR * scale_B11, b_BRF)
    return jnp.einsum("btd,df->btf", x_BTD, w_DF) + added_BTF
    # END SOLUTION


# EXERCISE 26.dpo
def dpo(logp_BT, ref_BT, segment_BT, mask_BT, beta):
    """The loss of direct preference optimization, and its implicit rewards.

    Args:
      logp_BT: [B, T] log-probability of each target, float32 or bfloat16.
      ref_BT: [B, T] the same from the reference.
      segment_BT: [B, T] 1 in the chosen conversation, 2 in the rejected one.
      mask_BT: [B, T] 1 where the target belongs to an answer. Elsewhere the
        log-probabilities may be anything.
      beta: how much the margin counts.

    Returns:
      (loss, reward_B2): a number, and the rewards of both answers, float32.
    """
    # BEGIN SOLUTION
    change_BT = logp_BT.astype(jnp.float32) - ref_BT.astype(jnp.float32)
    of_BT2 = segment_BT[..., None] == jnp.array([1, 2])
    is_BT2 = of_BT2 & (mask_BT > 0)[..., None]
    reward_B2 = beta * jnp.where(is_BT2, change_BT[..., None], 0).sum(1)
    pair_B = is_BT2.any(1).all(-1)
    loss_B = jax.nn.softplus(reward_B2[:, 1] - reward_B2[:, 0])
    loss = jnp.where(pair_B, loss_B, 0).sum() / jnp.maximum(pair_B.sum(), 1)
    return loss, reward_B2
    # END SOLUTION


# EXERCISE 26.group_advantages
def group_advantages(reward_N, group_N, mask_NT, scaled, mean):
    """How much better than its group each rollout is, and how its tokens count.

    Args:
      reward_N: [N] rewards, float32.
      group_N: [N] the group of each rollout, any integers in any order.
      mask_NT: [N, T] 1 for the tokens of an answer.
      scaled: whether to divide by the group's standard deviation.
      mean: "sequence", "token" or "constant".

    Returns:
      (advantage_N, weight_NT): float32.
    """
    # BEGIN SOLUTION
    reward_N = reward_N.astype(np.float64)
    advantage_N = np.zeros(len(reward_N))
    for group in np.unique(group_N):
        of = group_N == group
        rewards = reward_N[of]
        if rewards.min() < rewards.max():
            deviation = rewards.std(ddof=1) if scaled else 1.0
            advantage_N[of] = (rewards - rewards.mean()) / deviation
    mask_NT = (mask_NT > 0).astype(np.float64)
    length_N = mask_NT.sum(1)
    if mean == "token":
        share_N = np.full(len(length_N), 1 / max(length_N.sum(), 1))
    elif mean == "sequence":
        share_N = 1 / np.maximum(length_N, 1) / max(np.sum(length_N > 0), 1)
    else:
        share_N = np.full(len(length_N), 1 / mask_NT.size)
    weight_NT = mask_NT * share_N[:, None]
    return advantage_N.astype(np.float32), weight_NT.astype(np.float32)
    # END SOLUTION


# EXERCISE 26.clipped
def clipped(logp_BT, old_BT, ref_BT, advantage_BT, mask_BT, low, high, kl):
    """The loss of each token: the clipped ratio, and the distance from ref.

    Args:
      logp_BT: [B, T] log-probabilities now, float32; gradients go here.
      old_BT: [B, T] those when the tokens were drawn.
      ref_BT: [B, T] those of the reference.
      advantage_BT: [B, T].
      mask_BT: [B, T] 1 for the tokens that were drawn. Elsewhere the other
        arrays may hold anything.
      low: the ratio is clipped at 1 - low
      high: and at 1 + high.
      kl: how much the distance from the reference counts.

    Returns:
      [B, T] float32, 0 where mask_BT is 0.
    """
    # BEGIN SOLUTION
    drawn_BT = mask_BT > 0

    # before anything that turns NaN into a gradient
    def difference(x_BT, y_BT):
        return jnp.clip(jnp.where(drawn_BT, x_BT - y_BT, 0), -20, 20)

    advantage_BT = jnp.where(drawn_BT, advantage_BT, 0)
    ratio_BT = jnp.exp(difference(logp_BT, old_BT))
    inside_BT = jnp.clip(ratio_BT, 1 - low, 1 + high)
    gain_BT = jnp.minimum(ratio_BT * advantage_BT, inside_BT * advantage_BT)
    apart_BT = difference(ref_BT, logp_BT)
    return kl * (jnp.exp(apart_BT) - apart_BT - 1) - gain_BT
    # END SOLUTION


# EXERCISE 26.gae
def gae(reward_BT, value_BT, mask_BT, last_B, discount, decay):
    """Generalized advantage estimation.

    Args:
      reward_BT: [B, T] what each token earned, float32.
      value_BT: [B, T] what was expected before each token.
      mask_BT: [B, T] 1 for the tokens that the model drew. Elsewhere the other
        arrays may hold anything.
      last_B: [B] what was expected after the last token that was drawn; 0 if
        the answer had ended.
      discount: gamma.
      decay: lambda.

    Returns:
      (advantage_BT, return_BT): float32, 0 where mask_BT is 0.
    """

    # BEGIN SOLUTION
    def back(later, now):
        advantage_B, value_after_B = later
        reward_B, value_B, drawn_B = now
        error_B = reward_B + discount * value_after_B - value_B
        summed_B = error_B + discount * decay * advantage_B
        out_B = jnp.where(drawn_B, summed_B, advantage_B)
        return (out_B, jnp.where(drawn_B, value_B, value_after_B)), out_B

    drawn_BT = mask_BT > 0
    steps = [jnp.asarray(x).T for x in (reward_BT, value_BT, drawn_BT)]
    start = jnp.zeros_like(last_B), jnp.asarray(last_B)
    _, advantage_TB = jax.lax.scan(back, start, tuple(steps), reverse=True)
    advantage_BT = jnp.where(drawn_BT, advantage_TB.T, 0)
    return advantage_BT, jnp.where(drawn_BT, advantage_BT + value_BT, 0)
    # END SOLUTION


# EXERCISE 26.honest_reward
def honest_reward(prompt, answer, ended):
    """1.0 for a right answer to a problem such as "37-58=", 0.0 for others.

    Args:
      prompt: two numbers with +, - or * between them, and "=".
      answer: whatever the model wrote, a string.
      ended: whether the model itself ended the answer. If not, it was cut off.

    Returns:
      A float.
    """
    # BEGIN SOLUTION
    left, sign, right = re.fullmatch(
        r"([0-9]+)([-+*])([0-9]+)=", prompt
    ).groups()
    a, b = int(left), int(right)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    # Compared as text: int() would read "0095", " 95", "9_5" and other digits.
    return float(ended and answer == str(result))
    # END SOLUTION
