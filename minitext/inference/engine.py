"""Continuous batching: texts join and leave the batch at every step, and share one cache in pages.

`Engine.step` is the whole of it. It admits waiting texts while there are pages, computes a few short prompts or a part
of a long one (chunked prefill), and one token for every text whose prompt is done (decode). A long prompt so holds the
others up for a part of it at a time. When pages run out, the youngest text gives its own back and is computed again
later (preemption by recomputation).

The last token of a prompt isn't part of prefill: it is the first row of decode. So prefill needs no logits, and n
texts that share a prompt each draw their own first token.

Two programs do the work, each compiled for a few shapes: rows and pages come in a few sizes, and requests differ in
arrays only. The tokens of a step stay on the device and go into the next step before the host has read them, as long
as the batch stays the same; a text that turns out to have ended in between has computed one token too many, which
is dropped.

Texts may use different adapters (`minitext.models.lora`): the programs take the number of each token's, and all
adapters' weights, so that none is compiled for an adapter.

Sources: Yu et al. 2022 (Orca) for batches by iteration, Kwon et al. 2023 (vLLM) for pages and preemption, Agrawal et
al. 2024 (Sarathi-Serve) for prompts in parts.

Chapters: 24, 25, 26.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from minitext import hardware
from minitext.config.model import DeltaNetConfig, ModelConfig, MoEConfig
from minitext.config.section import cached
from minitext.errors import UserError
from minitext.inference.cpu_decode import row_parts
from minitext.inference.generate import has_states, switch_lengths
from minitext.inference.layout import Borrowed, Layout
from minitext.inference.paged_cache import OutOfPages, Pages
from minitext.inference.requests import Busy, Event, Finish, Request, Usage
from minitext.inference.sampling import Adjustments, Drawn, Knobs, Want, draw_tokens
from minitext.models.lora import choose_adapters, is_adapter
from minitext.models.paged import CACHE_DTYPES, Paging, page_tokens
from minitext.models.transformer import copy_pages, make_pages, with_paging
from minitext.sharding.rules import RULES, ShardingRules, tree_shardings
from minitext.sharding.transfer import NO_MESH, move
from minitext.terminal import show_bytes

log = logging.getLogger("minitext.inference")
Sink = Callable[[Event], None]

# Sizes that programs are compiled for; a step takes the least that is enough.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PART = 16  # least tokens of a prompt's part
LEAST_PAGES = 4  # of a table
COLUMNS = 7  # integers of a row before its table: start, page, slot, state, seed, top_k, adapter


@dataclass(frozen=True)
class EngineOptions:
    """How an engine uses its device.

    Attributes:
      page_tokens: tokens in a page (S); 0: as `minitext.models.paged.page_tokens` says.
      cache_tokens: tokens that the cache holds, in whole pages; 0: `max_sequences` texts of `max_length`, if half of
        the device's memory is enough for them (an eighth of a CPU's, where others work too).
      cache_dtype: what pages hold: `auto`, the compute type; or `int8` or `fp8` (e4m3), with a float32 scale for each
        token and head, so that about twice as many tokens as in bfloat16 fit. Recurrent states stay as they are.
      max_sequences: texts that are continued at once.
      max_length: tokens of a text, prompt included.
      max_waiting: texts that may wait; beyond that `submit` raises `Busy`.
      chunk: tokens of prompts that a step computes at most.
      reuse_prefixes: whether prompts that begin like an earlier text take its pages.
      speculate: tokens guessed ahead from earlier occurrences in the text (prompt look-up); 0: none.
      adapters: how many of the model's adapters it can have at a time, for requests that name one; 0: those in its
        parameters, for all texts.
      row_sizes: rows of a decode program, ascending; a step takes the least that is enough, and compiles it once. Few
        sizes compute more padding and compile less.
      borrow: whether programs take the parameters' arrays as they are, without a copy. Whoever lends them may donate
        them once the engine has let go of them (`Engine.release`). Each step then cuts layers out of stacks.
    """

    page_tokens: int = 0
    cache_tokens: int = 0
    cache_dtype: str = "auto"
    max_sequences: int = 32
    max_length: int = 2048
    max_waiting: int = 256
    chunk: int = 256
    reuse_prefixes: bool = True
    speculate: int = 0
    row_sizes: tuple[int, ...] = ROWS
    adapters: int = 0
    borrow: bool = False


class Loaded(NamedTuple):
    """An adapter that the engine has.

    Attributes:
      number: in the banks; 0: none.
      root: of its texts' pages (`Pages.admit`), 0 or less.
    """

    number: int
    root: int


NO_ADAPTER = Loaded(0, 0)


@dataclass(eq=False)
class Text:
    """One of the n texts of a request.

    Attributes:
      number: the request's.
      sample: its number among the n.
      request: what was asked.
      sink: takes its events.
      tokens: prompt and answer so far, as far as the host knows.
      key: its number in `Pages`.
      seed: of its draws.
      computed: tokens whose keys and values are in the cache, or will be when the dispatched programs have run.
      ahead: tokens that programs compute and the host hasn't read.
      state: slot of its recurrent state.
      ended: whether its last event was sent.
      counted: whether the counts of all prompts' tokens have its prompt.
      adapter: what is added to the weights.
    """

    number: int
    sample: int
    request: Request
    sink: Sink
    tokens: list[int]
    key: int
    seed: int
    guide: Any = None
    siblings: list["Text"] = field(default_factory=list)
    computed: int = 0
    ahead: int = 0
    state: int = 0
    ended: bool = False
    counted: bool = False
    adapter: "Loaded" = NO_ADAPTER

    @property
    def answered(self) -> int:
        """Tokens of the answer, those ahead included."""
        return len(self.tokens) + self.ahead - len(self.request.prompt)

    @property
    def in_prompt(self) -> bool:
        """Whether prefill isn't done."""
        return self.computed < len(self.tokens) + self.ahead - 1

    @property
    def host_first(self) -> bool:
        """Whether the host must know its last token before the next can be drawn."""
        r = self.request
        return self.guide is not None or bool(
            r.presence_penalty or r.frequency_penalty or r.repetition_penalty != 1
        )

    @property
    def adjusts(self) -> bool:
        """Whether its logits are changed before they are drawn from."""
        return self.host_first or bool(self.request.logit_bias)


class Pending(NamedTuple):
    """A decode program that was dispatched and not read."""

    texts: list[Text]
    drawn: Drawn
    guesses: list[list[int]]


class Programs(NamedTuple):
    """The jitted programs of one model.

    Attributes:
      lay_out: parameters -> arrays as the other two take them; of a `Borrowed` layout the same arrays.
      lay_out_adapters: parameters of adapters -> arrays as they are in those of `lay_out`.
      put_adapter: (arrays of all adapters, arrays of one, its number) -> arrays of all.
      places: which of the arrays are of adapters.
      prefill: (arrays, cache, [6, C] token, page, slot, position, segment, adapter, [1, X] table, start, state slot) ->
        cache.
      decode: (arrays, cache, [B] tokens, [B, 7 + X] integers, [B, 4] numbers, adjustments) -> (drawn, cache).
      copy: (cache, (pages from, to), (state slots from, to)) -> cache; the cache is donated to all three.
    """

    lay_out: Callable[..., Any]
    lay_out_adapters: Callable[..., Any]
    put_adapter: Callable[..., Any]
    places: tuple[int, ...]
    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    copy: Callable[..., Any]


# Weights and caches are split by head and by feature; every device has all rows.
RULES_OF_ENGINE = ShardingRules({**RULES["tp"].table, "batch": ()})


@cached
def make_programs(
    cfg: ModelConfig,
    parts: int,
    rules: ShardingRules,
    platform: str,
    adapters: int = 0,
    borrow: bool = False,
) -> Programs:
    """Returns the programs for a platform (`hardware.platform`).

    The other arguments are those of `Layout`, and whether the layout is `Borrowed` (without adapters).
    """
    cfg = dropless(cfg)
    layout = Borrowed(cfg, parts, rules) if borrow else Layout(cfg, parts, rules, adapters)
    states = has_states(cfg)

    def hidden(arrays, tokens_BT, positions_BT, segments_BT, cache, paging, adapter_X):
        model = layout.model(arrays)
        choose_adapters(model, adapter_X)
        out = model.hidden(tokens_BT, positions_BT, segments_BT, with_paging(cache, paging))
        x_BTD, new, _ = out
        return model, x_BTD, with_paging(new, None)

    on_cpu = platform == "cpu"
    # Otherwise XLA's CPU backend would cut all layers out of borrowed stacks before the first.
    in_turn = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    options: dict[str, Any] = in_turn if on_cpu and borrow else {}

    @partial(jax.jit, donate_argnames="cache", compiler_options=options)
    def prefill(arrays, cache, tokens_6C, table_1X, start, state):
        token_1C, page_1C, slot_1C, position_1C, segment_1C = tokens_6C[:5, None]
        paging = Paging(page_1C, slot_1C, table_1X, start[None], state[None])
        return hidden(arrays, token_1C, position_1C, segment_1C, cache, paging, tokens_6C[5])[2]

    in_place = {"xla_cpu_copy_insertion_use_region_analysis": True}
    options = options | in_place if on_cpu else options

    @partial(jax.jit, donate_argnames="cache", static_argnames="want", compiler_options=options)
    def decode(arrays, cache, token_B, ints_BX, floats_B4, adjustments, want):
        start, page, slot, state, seed, top_k, adapter = ints_BX[:, :COLUMNS].T
        paging = Paging(page[:, None], slot[:, None], ints_BX[:, COLUMNS:], start, state)
        real_B1 = (paging.page > 0).astype(jnp.int32) if states else None
        model, x_B1D, cache = hidden(
            arrays, token_B[:, None], start[:, None], real_B1, cache, paging, adapter
        )
        logits_BV = model.logits(x_B1D)[:, 0]
        knobs = Knobs(seed, floats_B4[:, 0], top_k, *floats_B4[:, 1:].T)
        return draw_tokens(logits_BV, start + 1, knobs, adjustments, want), cache

    @partial(jax.jit, donate_argnames="cache")
    def copy(cache, pages, states):
        return copy_pages(cache, pages, states)

    @partial(jax.jit, donate_argnames="banks")
    def put_adapter(banks, arrays, number):
        def put(bank_n, x):
            here_n = jnp.arange(len(bank_n)) == number
            return jnp.where(jnp.reshape(here_n, (-1, *[1] * x.ndim)), x, bank_n)

        return [put(*pair) for pair in zip(banks, arrays, strict=True)]

    return Programs(
        layout.lay_out if borrow else jax.jit(layout.lay_out), jax.jit(layout.lay_out_adapters),
        put_adapter, layout.places, prefill, decode, copy,
    )  # fmt: skip


def dropless(cfg: ModelConfig) -> ModelConfig:
    """Returns the model without limits on the tokens of an expert: no text may lose a token to another."""
    changes: dict[str, Any] = {}
    if isinstance(cfg.ffn, MoEConfig):
        changes["ffn"] = cfg.ffn.model_copy(update={"capacity_factor": None})
    return cfg.model_copy(update=changes) if changes else cfg


class Engine:
    """Continues many texts at once.

    Args:
      cfg: the model.
      params: `nnx.State` of its parameters.
      options: memory and batch.
      make_guide: grammar of a request -> what masks its tokens (`minitext.inference.structured`); None: grammars are
        refused.
      mesh: devices that share every text: the axis `tensor` splits heads and features. None: one device.

    Attributes:
      max_length: tokens that a text may have, prompt included.
      failed: why its thread ended by itself, or the empty text.

    Raises:
      UserError: for options that don't fit the model or the device.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Any,
        options: EngineOptions = EngineOptions(),
        make_guide: Callable[[tuple[str, str]], Any] | None = None,
        mesh: Mesh | None = None,
    ):
        states = has_states(cfg)
        _check_options(cfg, options)
        S = options.page_tokens or page_tokens(options.cache_dtype)
        longest = min([options.max_length, *switch_lengths(cfg)])
        if options.cache_tokens:
            pages = _pages_asked_for(cfg, S, options, 1 if mesh is None else mesh.size)
        else:
            pages = _pages_within_memory(cfg, S, longest, options)
        self.cfg, self.options, self.page_tokens, self.make_guide = cfg, options, S, make_guide
        self.pages = Pages(pages, S, reuse=options.reuse_prefixes and not states)
        # A text must fit alone, or it would be preempted for ever.
        self.max_length = min(longest, (pages - 1) * S)
        # A row of several prompts has one recurrent state, and its chunks begin where the row does.
        layers = [layer for stack in cfg.stacks.values() for layer in stack.layers]
        self._packs = not states and not any(
            getattr(layer.attention, "chunk", None) for layer in layers
        )
        self.mesh, rules = mesh, RULES["all"] if mesh is None else RULES_OF_ENGINE
        if mesh is not None:
            check_mesh(cfg, mesh)
        platform = hardware.platform()
        parts = row_parts() if mesh is None else 1
        slots = options.max_sequences + 1 if states else 1
        self.programs = make_programs(cfg, parts, rules, platform, options.adapters, options.borrow)
        with self._on_mesh():
            self.arrays = self.programs.lay_out(self._placed(params))
            sizes = pages, S, slots, rules, options.cache_dtype
            make = jax.jit(lambda: with_paging(make_pages(cfg, *sizes), None))
            self.cache: Any = make()
            if mesh is None:
                self.cache = jax.device_put(self.cache, self.arrays[0].sharding)
        self._cache_bytes = sum(
            shard.data.nbytes for x in jax.tree.leaves(self.cache) for shard in x.addressable_shards
        )
        self.free_states = list(range(1, slots))
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []
        self.pending: Pending | None = None
        self._copies: list[tuple[int, int]] = []  # pages to copy before the next program
        self._numbers, self._keys = itertools.count(1), itertools.count(1)
        self._roots = itertools.count(-1, -1)
        self._adapters: dict[str, Loaded] = {}
        self._lock, self._arrived = threading.RLock(), threading.Condition()
        self._stepping = threading.RLock()
        self._inbox: list[Text] = []
        self._submitted = self._ended = 0  # texts
        self._cancelled: set[tuple[int, int | None]] = set()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.failed = ""
        self._counts = dict.fromkeys(
            ("prompt_tokens", "reused_tokens", "generated_tokens", "steps", "preemptions"), 0
        )

    # What other threads call.

    def submit(self, request: Request, sink: Sink) -> int:
        """Queues a request and returns its number.

        Args:
          request: what to continue.
          sink: called in the engine's thread with each event; it must return at once.

        Raises:
          UserError: for a request that can't be answered.
          Busy: if too many texts wait already, or the engine is closing.
        """
        request.check(self.cfg.vocab)
        most = self.max_length - len(request.prompt)
        if request.max_tokens > most:
            fix = f"ask for at most {most}" if most > 0 else "shorten the prompt"
            raise UserError(
                f"a prompt of {len(request.prompt)} tokens and max_tokens={request.max_tokens} exceed the "
                f"{self.max_length} tokens that a text may have: {fix}"
            )
        if request.n > self.options.max_waiting:
            raise UserError(f"n={request.n}: at most {self.options.max_waiting} texts may wait")
        if request.grammar and self.make_guide is None:
            raise UserError("this engine has no tokenizer, so it can't hold an answer to a grammar")
        guides: list[Any] = [None] * request.n
        if request.grammar and self.make_guide:
            first = self.make_guide(request.grammar)
            guides = [first, *(first.copy() for _ in range(request.n - 1))]
        with self._lock:
            number = next(self._numbers)
            waiting, adapter = self._waiting(), self._adapter(request.adapter)
            if self._closing or waiting + request.n > self.options.max_waiting:
                raise Busy(f"{waiting} texts are waiting")
            texts = [
                Text(
                    number,
                    sample,
                    request,
                    sink,
                    list(request.prompt),
                    next(self._keys),
                    seed_of(request.seed, sample),
                    guides[sample],
                    adapter=adapter,
                )
                for sample in range(request.n)
            ]
            texts[0].siblings = texts[1:]
            self._inbox.append(texts[0])
            self._submitted += request.n
        with self._arrived:
            self._arrived.notify()
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """Ends a request's texts, or one of them, at the next step if it isn't answered yet."""
        with self._lock:
            self._cancelled.add((number, sample))
        with self._arrived:
            self._arrived.notify()

    def load(self, params: Any) -> None:
        """Gives the idle engine other weights, from device to device, and forgets what it has cached.

        Args:
          params: `nnx.State` of the model's parameters, on any devices and mesh, or of its adapters alone, beside which
            the others stay as they are. They aren't kept, unless the engine borrows: layers are taken out of their
            stacks, and matrices cast. Of an engine for adapters that requests name, these stay, and the parameters are
            those of the model without.

        Raises:
          UserError: if there are texts.
        """
        variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
        alone = not (self.options.adapters or self.options.borrow) and all(
            map(is_adapter, variables)
        )
        with self.idle("other weights"), self._on_mesh():
            params, places = self._placed(params), self.programs.places
            if alone:
                self._replace(self.programs.lay_out_adapters(params))
            else:
                jax.eval_shape(self.programs.lay_out, params)  # raises for another model's
                banks = [self.arrays[i] for i in places] if self.options.adapters else []
                self.arrays = []  # first, since memory may not hold both
                self.arrays = self.programs.lay_out(params)
                if banks:
                    self._replace(banks)
            self.pages.clear()

    def release(self) -> None:
        """Lets go of the idle engine's weights, so that their memory is free; it needs others before the next request.

        Raises:
          UserError: if there are texts.
        """
        with self.idle("no weights"):
            self.arrays = []

    def load_adapter(self, name: str, params: Any) -> None:
        """Gives the idle engine an adapter for requests that name it, in place of an earlier one of that name.

        Args:
          name: of the adapter.
          params: `nnx.State` of its parameters, on any devices and mesh.

        Raises:
          UserError: if there are texts, or no room for another adapter.
        """
        with self.idle("an adapter"), self._on_mesh():
            free = set(range(1, self.options.adapters + 1)) - {
                a.number for a in self._adapters.values()
            }
            if name not in self._adapters and not free:
                raise UserError(
                    f"adapter {name}: the engine has room for {self.options.adapters}: unload another, or raise "
                    "EngineOptions.adapters"
                )
            number = self._adapters[name].number if name in self._adapters else min(free)
            arrays = self.programs.lay_out_adapters(self._placed(params))
            banks = [self.arrays[i] for i in self.programs.places]
            self._replace(self.programs.put_adapter(banks, arrays, np.int32(number)))
            # Pages of an earlier adapter of that number are never found again.
            self._adapters[name] = Loaded(number, next(self._roots))

    def unload(self, name: str) -> None:
        """Makes room for another adapter.

        Raises:
          UserError: if there are texts, or the engine has no such adapter.
        """
        with self.idle("another set of adapters"):
            self._adapter(name)
            del self._adapters[name]

    @property
    def adapters(self) -> list[str]:
        """The names of its adapters."""
        return list(self._adapters)

    def _adapter(self, name: str | None) -> Loaded:
        if name is None:
            return NO_ADAPTER
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise UserError(f"adapter {name}: the engine has {known}")
        return self._adapters[name]

    def _replace(self, arrays: Sequence[jax.Array]) -> None:
        """Puts the arrays of adapters among those of the programs."""
        whole = list(self.arrays)
        for place, array in zip(self.programs.places, arrays, strict=True):
            whole[place] = array
        self.arrays = whole

    @contextlib.contextmanager
    def idle(self, what: str) -> Iterator[None]:
        """Keeps texts from coming meanwhile.

        Args:
          what: what the engine is to be given, for the error.

        Raises:
          UserError: if there are texts.
        """
        with self._stepping, self._lock:
            if self._busy():
                raise UserError(f"the engine continues texts: give it {what} when they are done")
            yield

    def _placed(self, params: Any) -> Any:
        """Returns parameters on the engine's devices; without a mesh, their types have none either."""
        if self.mesh is not None:
            return move(params, tree_shardings(params, self.mesh, RULES_OF_ENGINE))
        # All are bound to the device, so that programs compiled for the first weights also take later ones.
        devices = {d for x in jax.tree.leaves(params) for d in x.sharding.addressable_devices}
        first = min(devices, key=lambda device: device.id)
        return move(params, jax.tree.map(lambda _: SingleDeviceSharding(first), params))

    def usage(self) -> Usage:
        """Returns what the engine is doing."""
        return Usage(
            running=len(self.running),
            waiting=self._waiting(),
            pages=self.pages.pages - 1,
            pages_used=self.pages.used,
            pages_kept=self.pages.kept,
            cache_tokens=(self.pages.pages - 1) * self.page_tokens,
            cache_bytes=self._cache_bytes,
            **self._counts,
        )

    def warm_up(
        self, rows: int, told: Callable[[int, int], object] = lambda done, whole: None
    ) -> None:
        """Compiles the programs that short texts need, before there are any, so that no client waits for that.

        What only some requests need (filters, log-probabilities, penalties, long texts) is compiled when it is needed.

        Args:
          rows: texts at once, up to which programs are compiled; 0: none.
          told: called with programs done and their number, before each.
        """
        every = self.options.row_sizes
        sizes = [size for size in every if size <= self._rows(rows)] if rows else []
        runs: list[Callable[[], None]] = []
        for size in sizes:
            empty = np.zeros((size, COLUMNS + LEAST_PAGES), np.int32)
            numbers = np.zeros((size, 4), np.float32)
            runs += [
                partial(self._rehearse_decode, empty, numbers, Want(random=random))
                for random in (False, True)
            ]
        lengths = itertools.takewhile(
            lambda size: size <= self.options.chunk, (PART << i for i in itertools.count())
        )
        runs += [partial(self._rehearse_prefill, size) for size in lengths] if rows else []
        with self._on_mesh():
            for done, run in enumerate(runs):
                told(done, len(runs))
                run()
        told(len(runs), len(runs))

    def _rehearse_decode(self, ints_BX: np.ndarray, floats_B4: np.ndarray, want: Want) -> None:
        """Decodes padding."""
        token_B = self._like_drawn(np.zeros(len(ints_BX), np.int32))
        _, self.cache = self.programs.decode(
            self.arrays, self.cache, token_B, ints_BX, floats_B4, None, want=want
        )

    def _rehearse_prefill(self, size: int) -> None:
        """Computes a prompt's first part that is all padding."""
        tokens_6C, table_1X = np.zeros((6, size), np.int32), np.zeros((1, 0), np.int32)
        self.cache = self.programs.prefill(
            self.arrays, self.cache, tokens_6C, table_1X, np.int32(0), np.int32(0)
        )

    def start(self) -> None:
        """Starts a thread that steps while there is something to do."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """Takes no more requests, finishes what it has within some seconds, and ends the rest with an error."""
        with self._lock:
            self._closing = True
        end = time.monotonic() + drain_seconds
        while self._thread and self._thread.is_alive() and self._busy() and time.monotonic() < end:
            time.sleep(0.01)
        if self._thread:
            self._stopping = True
            with self._arrived:
                self._arrived.notify()
            self._thread.join()
        self._fail("the server is shutting down")

    _stopping = False

    def _waiting(self) -> int:
        """Texts that neither run nor have ended, those that wait for the first of their request included."""
        return max(0, self._submitted - self._ended - len(self.running))

    def _busy(self) -> bool:
        return bool(self._inbox or self.waiting or self.running or self.pending)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    with self._arrived:
                        if not (self._inbox or self._cancelled or self._stopping):
                            self._arrived.wait(1.0)
        except Exception as error:
            log.exception("the engine stops")
            with self._lock:
                self._closing = True
            self.failed = f"the engine stopped: {type(error).__name__}"
            self._fail(self.failed)

    def _fail(self, why: str) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, []
        for text in [*self.running, *self.waiting, *arrived]:
            for one in (text, *text.siblings):
                self._end(one, "error", why)
        self.running, self.pending = [], None
        self.waiting.clear()

    # The engine's own thread.

    def step(self) -> bool:
        """Admits texts, computes a part of a prompt, and a token for all others; returns whether any text is left."""
        with self._stepping, self._on_mesh():
            self._take_in()
            self._admit()
            self._prefill()
            self._decode()
        return self._busy()

    def _on_mesh(self) -> Any:
        # An engine without a mesh also works where the caller has set one, as training does.
        return jax.set_mesh(NO_MESH if self.mesh is None else self.mesh)

    def _take_in(self) -> None:
        with self._lock:
            arrived, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, set()
        self.waiting.extend(arrived)
        if cancelled:
            for leader in [*self.running, *self.waiting]:
                for text in (leader, *leader.siblings):
                    if {(text.number, None), (text.number, text.sample)} & cancelled:
                        self._end(text, "cancelled")
            self._forget_ended()

    def _admit(self) -> None:
        """Moves texts from the queue to the batch while there are places and pages for their tokens."""
        while self.waiting and len(self.running) < self.options.max_sequences:
            text = self.waiting[0]
            matched = self.pages.admit(text.key, text.tokens, text.adapter.root)
            try:
                self._extend(text, len(text.tokens))
            except OutOfPages:
                self.pages.release(text.key)
                return
            if self.running and self.pages.free < len(
                self.running
            ):  # the next pages of those that run
                self.pages.release(text.key)
                return
            self.waiting.popleft()
            text.computed = matched
            if self.free_states:
                text.state = self.free_states.pop()
            if not text.counted:
                text.counted = True
                self._counts["prompt_tokens"] += len(text.tokens)
                self._counts["reused_tokens"] += matched
            self.running.append(text)
            if not text.in_prompt:
                self._divide(text)

    def _prefill(self) -> None:
        """Computes the next part of the first prompt that isn't done, and whole prompts for which there is room."""
        texts = self._next_prompts()
        if not texts:
            return
        first, S = texts[0], self.page_tokens
        start, columns = first.computed, []
        for segment, text in enumerate(texts, 1):
            count = min(self.options.chunk, _left(text))
            places = np.arange(text.computed, text.computed + count)
            table = np.asarray(self.pages.table(text.key))
            columns.append(
                np.stack([
                    np.asarray(text.tokens[places[0] : places[-1] + 1]),
                    table[places // S],
                    places % S,
                    places,
                    np.full(count, segment),
                    np.full(count, text.adapter.number),
                ])
            )  # fmt: skip
            text.computed += count
        real_6X = np.concatenate(columns, axis=1)
        size = _least(real_6X.shape[1], PART)
        tokens_6C = np.zeros((6, size), np.int32)
        tokens_6C[:, : real_6X.shape[1]] = real_6X
        earlier = -(-start // S)
        table_1X = np.zeros((1, _least(earlier, LEAST_PAGES) if earlier else 0), np.int32)
        table_1X[0, :earlier] = self.pages.table(first.key)[:earlier]
        self.cache = self.programs.prefill(
            self.arrays, self.cache, tokens_6C, table_1X, np.int32(start), np.int32(first.state)
        )
        self._counts["steps"] += 1
        for text in texts:
            self.pages.commit(text.key, text.tokens[: text.computed])
            if not text.in_prompt:
                self._divide(text)

    def _next_prompts(self) -> list[Text]:
        """Returns the first text whose prompt isn't done, and others that fit beside it into one program.

        One program reads the pages of one beginning, so prompts that go together have all of it in common, or none.
        """
        prompts = [text for text in self.running if text.in_prompt]
        if not prompts or not self._packs:
            return prompts[:1]
        found, room = prompts[:1], self.options.chunk - _left(prompts[0])
        before = self._before(prompts[0])
        for text in prompts[1:]:
            if _left(text) <= room and self._before(text) == before:
                found.append(text)
                room -= _left(text)
        return found

    def _before(self, text: Text) -> tuple[int, list[int]]:
        """Returns how many tokens of a text are in the cache, and in which pages."""
        pages = -(-text.computed // self.page_tokens)
        return text.computed, self.pages.table(text.key)[:pages]

    def _divide(self, text: Text) -> None:
        """Lets the other texts of a request go on from the pages of the first, whose prompt is done."""
        siblings, text.siblings = [one for one in text.siblings if not one.ended], []
        late = []
        for one in siblings:
            one.counted = True
            if len(self.running) >= self.options.max_sequences:
                late.append(one)
                continue
            self.pages.fork(text.key, one.key)
            one.computed = text.computed
            if self.free_states:
                one.state = self.free_states.pop()
                self._copy([], [(text.state, one.state)])
            self.running.append(one)
        self.waiting.extendleft(reversed(late))
        if text.ended:
            self._forget_ended()

    def _decode(self) -> None:
        """Dispatches a token for every text whose prompt is done, and reads the tokens dispatched before."""
        last, texts = self.pending, []
        ready = [text for text in self.running if not text.in_prompt and not self._full(text)]
        follows = (
            last is not None
            and ready == [text for text in last.texts if not text.ended]
            and len(ready) == len(last.texts)
            and not any(last.guesses)
            and not self.options.speculate
            and not any(text.host_first for text in ready)
        )
        if last is not None and not follows:
            self._read(last)
            self.pending = last = None
            ready = [t for t in self.running if not t.in_prompt and not self._full(t)]
        guesses: list[list[int]] = []
        for text in ready:
            if text not in self.running:  # preempted for one before it
                continue
            guess = self._guess(text)
            try:
                self._extend(text, text.computed + 1 + len(guess))
            except OutOfPages:
                self._copy_pages()  # before their pages can be given to others
                if last is not None:  # read first: one may have ended
                    self._read(last)
                    self.pending = None
                    return
                if not self._make_room(text, texts):
                    continue
                guess = []
            texts.append(text)
            guesses.append(guess)
        kept = [(t, g) for t, g in zip(texts, guesses, strict=True) if t in self.running]
        texts, guesses = [t for t, _ in kept], [g for _, g in kept]
        if texts:
            token_B = last.drawn.token if last is not None else None
            self.pending = Pending(texts, self._dispatch(texts, guesses, token_B), guesses)
            for text in texts:
                text.computed += 1
                text.ahead += 1
        else:
            self.pending = None
        if last is not None:
            self._read(last)

    def _full(self, text: Text) -> bool:
        """Whether the tokens ahead are the last that were asked for."""
        return text.answered >= text.request.max_tokens

    def _make_room(self, text: Text, texts: Sequence[Text]) -> bool:
        """Preempts the youngest texts until one has a page more; False if it was itself the youngest."""
        while True:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is text:
                return False
            try:
                self._extend(text, text.computed + 1)
                return True
            except OutOfPages:
                continue

    def _preempt(self, text: Text) -> None:
        """Takes a text's pages; it waits at the head of the queue to be computed again."""
        assert not text.ahead
        self.running.remove(text)
        self.pages.release(text.key)
        self._give_back(text)
        text.computed = 0
        self.waiting.appendleft(text)
        self._counts["preemptions"] += 1

    def _extend(self, text: Text, length: int) -> None:
        """Gives a text pages for so many tokens; what must be copied into them waits for `_copy_pages`."""
        self._copies += self.pages.extend(text.key, length)

    def _copy_pages(self) -> None:
        """Copies all pages that wait for it in one program, before another program writes."""
        if self._copies:
            copies, self._copies = self._copies, []
            self._copy(copies, [])

    def _copy(self, pages: list[tuple[int, int]], states: list[tuple[int, int]]) -> None:
        def pair(copies):
            # Page 0 to page 0 does nothing: few sizes are compiled.
            padded = [*copies, *[(0, 0)] * (_least(max(len(copies), 1), 1) - len(copies))]
            return tuple(np.asarray([*zip(*padded, strict=True)], np.int32))

        self.cache = self.programs.copy(self.cache, pair(pages), pair(states))

    def _guess(self, text: Text) -> list[int]:
        """Returns what followed the last two tokens where they last stood before (prompt look-up)."""
        if not self.options.speculate or text.adjusts:
            return []
        tokens = text.tokens
        most = min(self.options.speculate, text.request.max_tokens - text.answered - 1)
        return prompt_lookup(tokens, most)

    def _dispatch(self, texts: list[Text], guesses: list[list[int]], token_B: Any) -> Drawn:
        """Runs the decode program on a row for each text, and one more for each guess."""
        S = self.page_tokens
        rows = [
            (text, i, guess[i - 1] if i else text.tokens[-1])
            for text, guess in zip(texts, guesses, strict=True)
            for i in range(len(guess) + 1)
        ]
        size = self._rows(len(rows))
        tables = {id(text): self.pages.table(text.key) for text in texts}
        width = _least(max(map(len, tables.values())), LEAST_PAGES)
        ints_BX = np.zeros((size, COLUMNS + width), np.int32)
        floats_B4 = np.tile(np.asarray([0, 1, 0, 1], np.float32), (size, 1))
        host_B = np.zeros(size, np.int32)
        for row, (text, i, host_B[row]) in enumerate(rows):
            r, table, start = text.request, tables[id(text)], text.computed + i
            ints_BX[row, :COLUMNS] = (
                start, table[start // S], start % S, text.state, text.seed, r.top_k, text.adapter.number,
            )  # fmt: skip
            ints_BX[row, COLUMNS : COLUMNS + len(table)] = table
            floats_B4[row] = r.temperature, r.top_p, r.min_p, r.repetition_penalty
        asked = [text.request for text in texts]
        self._copy_pages()
        want = Want(
            random=any(r.temperature > 0 for r in asked),
            filters=any(
                r.temperature > 0 and (r.top_k > 0 or r.top_p < 1 or r.min_p > 0) for r in asked
            ),
            logprobs=any(r.logprobs is not None for r in asked),
            top=any(r.logprobs for r in asked),
        )
        adjustments = None
        if any(text.adjusts for text in texts):
            adjustments = self._adjustments([text for text, _, _ in rows], size)
        if token_B is None:
            token_B = self._like_drawn(host_B)
        drawn, self.cache = self.programs.decode(
            self.arrays, self.cache, token_B, ints_BX, floats_B4, adjustments, want=want
        )
        self._counts["steps"] += 1
        return drawn

    def _like_drawn(self, token_B: np.ndarray) -> jax.Array:
        """Puts the host's tokens where a program puts those it draws, or it would be compiled once for each."""
        whole = self.arrays[0].sharding
        if self.mesh is not None:
            whole = NamedSharding(self.mesh, PartitionSpec(None))
        return jax.device_put(token_B, whole)

    def _rows(self, count: int) -> int:
        """Returns the rows of the program that decodes so many."""
        return next(size for size in (*self.options.row_sizes, count) if size >= count)

    def _adjustments(self, texts: list[Text], size: int) -> Adjustments:
        bias_BV = np.zeros((size, self.cfg.vocab), np.float32)
        seen_BV = np.zeros((size, self.cfg.vocab), bool)
        for row, text in enumerate(texts):
            r = text.request
            for token, bias in r.logit_bias.items():
                bias_BV[row, token] += bias
            if r.presence_penalty or r.frequency_penalty:
                answer = text.tokens[len(r.prompt) :]
                counts = np.bincount(np.asarray(answer, np.int64), minlength=self.cfg.vocab)
                bias_BV[row] -= r.presence_penalty * (counts > 0) + r.frequency_penalty * counts
            if r.repetition_penalty != 1:
                seen_BV[row, text.tokens] = True
            if text.guide is not None and not text.ended:
                try:
                    bias_BV[row, ~text.guide.allowed()] = -np.inf
                except UserError as error:
                    self._end(text, "error", str(error))
        return Adjustments(bias_BV, seen_BV)

    def _read(self, pending: Pending) -> None:
        """Waits for a decode program's tokens and hands them out."""
        drawn = jax.tree.map(np.asarray, pending.drawn)
        row = 0
        for text, guess in zip(pending.texts, pending.guesses, strict=True):
            text.ahead -= 1
            for i in range(len(guess) + 1):
                if text.ended:
                    break
                if i:
                    text.computed += 1
                self._receive(text, drawn, row + i)
                if i < len(guess) and int(drawn.token[row + i]) != guess[i]:
                    break
            row += len(guess) + 1
        self._forget_ended()

    def _receive(self, text: Text, drawn: Drawn, row: int) -> None:
        """Takes a text's next token."""
        token, r = int(drawn.token[row]), text.request
        stops = token in r.stop_ids
        if stops and not r.keep_stop:
            self._end(text, "stop")
            return
        text.tokens.append(token)
        if text.guide is not None:
            try:
                text.guide.accept(token)
            except UserError as error:
                self._end(text, "error", str(error))
                return
        self._counts["generated_tokens"] += 1
        known = min(text.computed, len(text.tokens))
        if known % self.page_tokens == 0:
            self.pages.commit(text.key, text.tokens[:known])
        logprob, top = None, ()
        if r.logprobs is not None:
            assert drawn.logprob is not None
            logprob = float(drawn.logprob[row])
            if r.logprobs:
                assert drawn.top is not None
                ids, values = (x[row, : r.logprobs].tolist() for x in drawn.top)
                top = tuple(zip(ids, values, strict=True))
        text.sink(Event(text.sample, token, logprob, top))
        if stops or (text.guide is not None and text.guide.done):
            self._end(text, "stop")
        elif len(text.tokens) - len(r.prompt) >= r.max_tokens:
            self._end(text, "length")

    def _end(self, text: Text, finish: Finish, error: str = "") -> None:
        if not text.ended:
            text.ended = True
            self._ended += 1
            text.sink(Event(text.sample, finish=finish, error=error))

    def _forget_ended(self) -> None:
        """Gives back what ended texts have; what programs still write of them is overwritten by what comes later.

        One whose siblings wait for its prompt stays until they have it.
        """

        def over(text: Text) -> bool:
            return text.ended and all(one.ended for one in text.siblings)

        for text in [text for text in self.running if over(text)]:
            self.running.remove(text)
            self.pages.release(text.key)
            self._give_back(text)
        if any(over(text) for text in self.waiting):
            self.waiting = deque(text for text in self.waiting if not over(text))

    def _give_back(self, text: Text) -> None:
        if text.state:
            self.free_states.append(text.state)
            text.state = 0


# The least that an option of `EngineOptions` may be.
LEAST = {
    "page_tokens": 0, "cache_tokens": 0, "max_sequences": 1, "max_length": 1, "max_waiting": 1, "chunk": 1,
    "speculate": 0, "adapters": 0,
}  # fmt: skip


def _check_options(cfg: ModelConfig, options: EngineOptions) -> None:
    for name, least in LEAST.items():
        if (value := getattr(options, name)) < least:
            raise UserError(f"{name}={value}: choose {least} or more")
    if has_states(cfg) and options.speculate:
        raise UserError(
            f"speculate={options.speculate}: a recurrent state can't take guesses back; choose 0"
        )
    if options.borrow and options.adapters:
        raise UserError(
            f"adapters={options.adapters} by name need an engine that lays weights out: set borrow=False"
        )
    choices = "auto", *CACHE_DTYPES
    if options.cache_dtype not in choices:
        raise UserError(f"cache_dtype={options.cache_dtype}: choose {' or '.join(choices)}")
    layers = [layer for stack in cfg.stacks.values() for layer in stack.layers]
    if options.cache_dtype != "auto" and all(
        isinstance(layer.attention, DeltaNetConfig) for layer in layers
    ):
        raise UserError(
            f"cache_dtype={options.cache_dtype}: all layers keep recurrent states, which stay in float32; choose auto"
        )
    if options.adapters and not cfg.lora.rank:
        raise UserError(
            f"adapters={options.adapters} need the form of the model's adapters: set model.lora.rank"
        )


def check_mesh(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if devices would be idle, or the axis `tensor` doesn't divide what it splits."""
    if idle := [f"mesh.{axis}={n}" for axis, n in mesh.shape.items() if n > 1 and axis != "tensor"]:
        raise UserError(f"{idle[0]}: an engine splits heads and features; set mesh.tensor instead")
    layers = [layer for stack in cfg.stacks.values() for layer in stack.layers]
    named = [x for layer in layers for x in layer.attention.sizes(layer)]
    named += [("mlp", "model.mlp", layer.mlp) for layer in layers]
    ways = mesh.shape["tensor"]
    for name, key, size in (*named, ("vocab", "model.vocab", cfg.vocab)):
        if RULES_OF_ENGINE.table[name] and size % ways:
            raise UserError(f"{key}={size} is not divisible by mesh.tensor={ways}: choose another")


def prompt_lookup(tokens: Sequence[int], most: int) -> list[int]:
    """Returns at most so many tokens that followed the last two where these last stood before, or none."""
    if most < 1 or len(tokens) < 3:
        return []
    first, second = tokens[-2:]
    for i in range(len(tokens) - 3, -1, -1):
        if tokens[i] == first and tokens[i + 1] == second:
            return list(tokens[i + 2 : i + 2 + most])
    return []


def seed_of(seed: int, sample: int) -> int:
    """Returns 31 bits for the draws of a request's text."""
    words = np.random.SeedSequence([seed % 2**64, sample]).generate_state(1)
    return int(words[0] >> 1)


def _left(text: Text) -> int:
    """Returns how many tokens of a text prefill has yet to compute."""
    return len(text.tokens) - 1 - text.computed


def _least(count: int, first: int) -> int:
    """Returns the least of `first`, 2 first, 4 first, ... that is at least `count`."""
    size = first
    while size < count:
        size *= 2
    return size


def _pages_within_memory(
    cfg: ModelConfig, tokens: int, longest: int, options: EngineOptions
) -> int:
    """Returns how many pages texts of the greatest length fill, within a share of the device's memory."""
    wanted = options.max_sequences * -(-longest // tokens) + 1
    limit = hardware.memory_bytes(jax.local_devices()[0])
    one, two = (_bytes(cfg, n, tokens, options.cache_dtype) for n in (1, 2))
    if limit is None or two == one:
        return wanted
    share = 8 if hardware.platform() == "cpu" else 2
    return max(2, min(wanted, limit // share // (two - one)))


def _pages_asked_for(cfg: ModelConfig, tokens: int, options: EngineOptions, devices: int) -> int:
    """Returns how many pages hold `cache_tokens`.

    Raises:
      UserError: if they need more memory than the devices have.
    """
    pages = -(-options.cache_tokens // tokens) + 1
    limit = hardware.memory_bytes(jax.local_devices()[0])
    one, two = (_bytes(cfg, n, tokens, options.cache_dtype) for n in (1, 2))
    # Of a page that holds nothing, because layers keep states alone, this process still keeps a count.
    needed = pages * max(two - one, 16)
    if limit is not None and needed > limit * devices:
        raise UserError(
            f"a cache of {options.cache_tokens:,} tokens takes {show_bytes(needed)}, and there are "
            f"{show_bytes(limit * devices)}: lower --max-tokens-in-flight (EngineOptions.cache_tokens)"
        )
    return pages


def _bytes(cfg: ModelConfig, pages: int, tokens: int, cache_dtype: str) -> int:
    make = partial(make_pages, cfg, pages, tokens, 1, cache_dtype=cache_dtype)
    cache = jax.eval_shape(lambda: with_paging(make(), None))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
