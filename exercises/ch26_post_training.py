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
    # YOUR CODE HERE
    raise NotImplementedError("26.loss_mask")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.lora_merge")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.lora_rows")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.dpo")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.group_advantages")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.clipped")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.gae")


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
    # YOUR CODE HERE
    raise NotImplementedError("26.honest_reward")
