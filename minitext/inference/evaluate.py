"""Benchmarks of the LM Evaluation Harness (`lm_eval`), answered by our model.

The harness reads a task's documents, writes the prompts and scores the answers. It asks a model two kinds of question:
how likely a continuation is after a context (multiple choice, perplexity), and what the model writes after a context.
The first is one forward pass without a cache, over texts of similar length. The second is the engine's work.

Source: Biderman et al. 2024, https://arxiv.org/abs/2405.14782.

Chapters: 24.
"""

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm_eval import tasks as harness
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from minitext import files
from minitext.config.model import ModelConfig
from minitext.data.chat import Chat, Renderer
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.inference.engine import Engine, EngineOptions, dropless
from minitext.inference.generate import switch_lengths
from minitext.inference.requests import Busy, Event, Request
from minitext.inference.text import TextStream
from minitext.models.transformer import Transformer
from minitext.sharding.rules import RULES
from minitext.terminal import of_slow_work

ROWS = 16  # texts of a forward pass
LEAST = 32  # tokens that a text is padded to at least
GENERATED = 256  # tokens of an answer, where the task doesn't say
UNDERSTOOD = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}


def load_tasks(names: Sequence[str], folder: str | None = None) -> list[Any]:
    """Returns tasks and groups of the harness, ready to be scored.

    Args:
      names: of tasks, groups or tags, or paths of YAML files. A task file can run code of its own (`!function`): load
        only files that you trust.
      folder: with tasks that can be named. None: the harness's own can be named; their documents come from the Hugging
        Face Hub.

    Raises:
      UserError: for a task that isn't known or can't be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    named = [name for name in names if not _is_file(name)]
    if named and folder is None:
        # The harness reads its 14,000 files in ten seconds. A name that is nowhere in them is found in one.
        text = _own_files()
        for name in named:
            if name not in text:
                raise _unknown(name, _NAMED.findall(text))
    manager = TaskManager(include_path=folder, include_defaults=folder is None and bool(named))
    for name in named:
        if name not in manager.all_tasks:
            raise _unknown(
                name, manager.all_tasks, f" in {files.shorten(folder)}" if folder else ""
            )
    try:
        loaded = manager.load([*names])
    except (
        Exception
    ) as error:  # the harness and `datasets` raise whatever a file or a download makes them
        reason = files.shorten(" ".join(str(error).split()))
        raise UserError(
            f"cannot load {', '.join(names)}: {type(error).__name__}: {reason}"
        ) from error
    inner = {name for names in loaded.get("group_map", {}).values() for name in names}
    found = {**loaded.get("groups", {}), **loaded["tasks"]}
    return [task for name, task in found.items() if name not in inner]


_NAMED = re.compile(r"^[\s-]*(?:task|group|tag): *([\w.-]+)", re.MULTILINE)


def _own_files() -> str:
    folder = Path(harness.__file__).parent
    return "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.y*ml"))


def _unknown(name: str, known: Sequence[str], where: str = "") -> UserError:
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else "name a task or a YAML file"
    return UserError(f"there is no task {files.shorten(name)}{where}: {advice}")


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def evaluate(
    model: "MinitextLM",
    tasks: list[Any],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    apply_chat_template: bool = False,
) -> dict[str, dict[str, Any]]:
    """Scores a model on tasks of the harness.

    Args:
      model: what answers.
      tasks: what `load_tasks` returned.
      num_fewshot: solved examples before each question; None: as the task says.
      limit: documents of each task; None: all.
      apply_chat_template: whether questions are put as a user's turn of a conversation.

    Returns:
      Task or group -> metric -> value, with `METRIC_stderr` and, for tasks, `samples`: the documents that were scored.

    Raises:
      UserError: for a task that asks for what the model doesn't do.
    """
    found: Any = simple_evaluate(
        model,
        tasks=tasks,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        log_samples=False,
        task_manager=TaskManager(include_defaults=False),
    )
    scores = {}
    for task, values in found["results"].items():
        counted = found["n-samples"].get(task)
        scores[task] = {"samples": counted["effective"]} if counted else {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")  # such as acc,none
            if comma and isinstance(value, int | float):
                scores[task][metric if kind == "none" else f"{metric} ({kind})"] = value
    return scores


class MinitextLM(TemplateLM):
    """A trained model as the harness wants it.

    Args:
      cfg: the model.
      params: `nnx.State` of its parameters.
      tokenizer: the model's.
      chat: its chat template and special tokens.
      max_length: tokens of a text, prompt included; longer contexts lose their beginning.
      max_sequences: texts that the engine continues at once.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        chat: Chat,
        *,
        max_length: int,
        max_sequences: int = 32,
    ):
        super().__init__()
        self._cfg, self._params, self._words, self._chat = dropless(cfg), params, tokenizer, chat
        self._options = EngineOptions(max_sequences=max_sequences, max_length=max_length)
        self._engine: Engine | None = None
        self._renderer, self._renders = Renderer(), False
        self.max_length = max_length
        begin = tokenizer.encode_batch([chat.special.get("bos_token", "")])[0]
        # A model whose tokenizer has no such token saw the end of the text before instead.
        self._first = int(begin[0]) if len(begin) == 1 else tokenizer.eod_id
        graphdef = nnx.graphdef(
            nnx.eval_shape(lambda: Transformer(self._cfg, rules=RULES["all"], rngs=nnx.Rngs(0)))
        )
        self._score = jax.jit(partial(_score, graphdef))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._words.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token that a text begins with where there is no context."""
        return self._first

    @property
    def tokenizer_name(self) -> str:
        """Not asked for: prompts aren't kept between runs."""
        return ""

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns the ids of a text, after the token that the model expects at the beginning, if it expects one."""
        if self._renders:  # a chat template writes all special tokens itself
            return self._words.encode_chat(string)
        begin = self._chat.special.get("bos_token")
        if add_special_tokens is False or (begin and string.startswith(begin)):
            return self._words.encode_batch([string])[0].tolist()
        return self._words.encode(string)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns messages as the model was trained to see them, up to where its answer begins."""
        if not add_generation_prompt:
            raise UserError(
                "a task begins the answer itself (gen_prefix): leave out --apply-chat-template"
            )
        self._renders = True
        return self._chat.render(chat_history, self._renderer)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the text of the chat template."""
        return self._chat.template if chat_template else None

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns, for each (context, continuation), the continuation's log-probability and whether it is greedy."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Returns the log-probability of each text, in nats; what exceeds a window is scored by the next."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(str(request.args[0]))
            for pair in get_rolling_token_windows(ids, self._first, self.max_length, 1):
                windows.append((("", ""), *make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += nats
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores tokens: in batches of texts of like length, padded at their ends, which no token before them sees."""
        texts = [
            ((context + continuation)[-self.max_length - 1 :], len(continuation))
            for _, context, continuation in requests
        ]
        if wrong := [n for _, n in texts if n > self.max_length]:
            raise UserError(
                f"a continuation of {wrong[0]} tokens exceeds the {self.max_length} of a text"
            )
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i][0]))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        with of_slow_work(max(len(texts), 1), "scoring") as told:
            while order:
                # LongRoPE goes by the largest position of a batch: none may have a text on each side of its switch.
                switched = self._switched(texts[order[0]])
                chosen = [i for i in order[:ROWS] if self._switched(texts[i]) == switched]
                order = order[len(chosen) :]
                arrays = _padded([texts[i] for i in chosen], self.max_length + 1)
                nats_B, greedy_B = map(np.asarray, self._score(self._params, *arrays))
                for i, nats, greedy in zip(chosen, nats_B, greedy_B, strict=False):
                    answers[i] = float(nats), bool(greedy)
                told(len(texts) - len(order))
        return answers

    def _switched(self, text: tuple[list[int], int]) -> int:
        """Returns how many of the model's LongRoPE layers' lengths a text's inputs exceed."""
        return sum(len(text[0]) - 1 > length for length in switch_lengths(self._cfg))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns what the model writes after each context, up to the first of the task's stop strings."""
        if self._engine is None:
            self._engine = Engine(self._cfg, self._params, self._options)
        engine, answers = self._engine, [""] * len(requests)
        with of_slow_work(max(len(requests), 1), "writing answers") as told:
            left = len(requests)

            def ended(number: int, text: str) -> None:
                nonlocal left
                answers[number], left = text, left - 1
                told(len(requests) - left)

            for number, request in enumerate(requests):
                asked, stop = self._request(*request.args)
                stream = TextStream(self._words, asked.prompt, stop)
                answer = _Answer(stream, engine.cancel, partial(ended, number))
                while True:
                    try:
                        answer.number = engine.submit(asked, answer)
                        break
                    except Busy:
                        engine.step()
            while engine.step():
                pass
        assert not left, left
        return answers

    def _request(self, context: str, generation: dict[str, Any]) -> tuple[Request, list[str]]:
        """Returns what to ask the engine, and the strings that end the answer."""
        said = cast("dict[str, Any]", normalize_gen_kwargs(generation, GENERATED))
        if unknown := sorted(k for k, v in said.items() if k not in UNDERSTOOD and v is not None):
            raise UserError(
                f"a task sets {unknown[0]}={said[unknown[0]]} for generation, which minitext doesn't know: "
                f"leave it out, or set one of {', '.join(sorted(UNDERSTOOD))}"
            )
        most = said["max_gen_toks"]
        if not 1 <= most < self.max_length:
            raise UserError(
                f"a task wants answers of {most} tokens (max_gen_toks), and a text has at most {self.max_length}: "
                "choose fewer there, or a larger --max-model-len"
            )
        prompt = self.tok_encode(context)[most - self.max_length :] or [self._first]
        longest = self._engine.max_length if self._engine else self.max_length
        if len(prompt) + most > longest:  # of LongRoPE, or of little memory
            raise UserError(
                f"a prompt of {len(prompt):,} tokens and an answer of {most:,} exceed the {longest:,} tokens that a "
                f"text may have here: set --max-model-len {longest}, and contexts lose their beginning"
            )
        return Request(
            tuple(prompt),
            most,
            temperature=said.get("temperature") or 0.0,
            top_p=said.get("top_p") or 1.0,
            top_k=said.get("top_k") or 0,
            min_p=said.get("min_p") or 0.0,
            stop_ids=self._chat.stops,
        ), [s for s in said.get("until") or [] if s]


class _Answer:
    """Collects the text of one answer from the engine's events."""

    def __init__(
        self, stream: TextStream, cancel: Callable[[int], None], ended: Callable[[str], None]
    ):
        self._stream, self._cancel, self._ended = stream, cancel, ended
        self._pieces: list[str] = []
        self.number = 0

    def __call__(self, event: Event) -> None:
        if event.token is not None and not self._stream.stopped:
            self._pieces.append(self._stream.push(event.token)[0])
            if self._stream.stopped:
                self._cancel(self.number)
        if event.finish is not None:
            self._pieces.append(self._stream.finish()[0])
            self._ended("".join(self._pieces))


def _score(
    graphdef: Any, params: Any, tokens_BT: jax.Array, keep_BT: jax.Array, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of the kept tokens of each row [B], and whether each is the most likely [B]."""
    model = nnx.merge(graphdef, params)
    x_BTD, _, _ = model.hidden(tokens_BT[:, :-1], positions_BT)

    def row(
        arrays: Any,
    ) -> tuple[jax.Array, jax.Array]:  # one at a time: logits of all rows would be large
        x_TD, target_T, keep_T = arrays
        logits_TV = model.logits(x_TD[None])[0].astype(jnp.float32)
        logprob_T = jnp.take_along_axis(logits_TV, target_T[:, None], 1)[:, 0]
        logprob_T -= jax.nn.logsumexp(logits_TV, 1)
        greedy_T = jnp.argmax(logits_TV, 1) == target_T
        return jnp.sum(jnp.where(keep_T, logprob_T, 0)), jnp.all(greedy_T | ~keep_T)

    return jax.lax.map(row, (x_BTD, tokens_BT[:, 1:], keep_BT))


def _padded(
    texts: Sequence[tuple[list[int], int]], most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens [B, T + 1], padded to one of a few sizes, which of the last T to score, and T's positions [B, T].

    Padding stays within the texts' positions.
    """
    longest, size = max(len(ids) for ids, _ in texts), LEAST
    while size < longest:
        size *= 2
    size = min(size, most)
    tokens_BT = np.zeros((ROWS, size), np.int32)
    keep_BT = np.zeros((ROWS, size - 1), bool)
    for row, (ids, scored) in enumerate(texts):
        tokens_BT[row, : len(ids)] = ids
        keep_BT[row, len(ids) - 1 - scored : len(ids) - 1] = True
    positions_T = np.minimum(np.arange(size - 1, dtype=np.int32), max(longest - 2, 0))
    return tokens_BT, keep_BT, np.broadcast_to(positions_T, keep_BT.shape)
