"""A conversation with a model: the messages so far, and answers as they are written.

Every turn renders all messages anew. The engine keeps the pages of earlier turns, so only what is new is computed.

Chapters: 26.
"""

from collections import deque
from collections.abc import Generator, Iterator

from minitext.data.chat import Chat, Renderer
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.inference.engine import Engine
from minitext.inference.generate import DEFAULT_SAMPLING, Sampling
from minitext.inference.requests import Event, Request
from minitext.inference.text import TextStream

LEAST = 16  # tokens that an answer may have, or the oldest messages are left out


class Conversation:
    """What was said, and what the model answers.

    Args:
      engine: the model; nobody else uses it meanwhile.
      chat: its template and the tokens that end its turns.
      tokenizer: the model's.
      system: a message that goes before all others; "": none.

    Attributes:
      messages: each with `role` and `content`, without the system's.
      forgotten: messages that were left out of the last prompt because the model's texts are too short for all.
    """

    def __init__(self, engine: Engine, chat: Chat, tokenizer: Tokenizer, system: str = ""):
        self.engine, self.chat, self.tokenizer, self.system = engine, chat, tokenizer, system
        self.messages: list[dict[str, str]] = []
        self.forgotten = 0
        self._renderer = Renderer()

    def ask(
        self,
        text: str,
        *,
        max_tokens: int = 512,
        sampling: Sampling = DEFAULT_SAMPLING,
        seed: int = 0,
    ) -> Generator[str]:
        """Yields the answer to a message in pieces of text.

        Each token yields a piece, though it may be empty. What was written when the caller stops asking for more is
        kept as the answer. A message without an answer isn't kept.

        Args:
          text: the message.
          max_tokens: of the answer, at most.
          sampling: how its tokens are chosen.
          seed: of the draws.

        Raises:
          UserError: if the template refuses the messages, or the message is too long for the model.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except UserError:
            self.messages.pop()
            raise
        request = Request(
            prompt, min(max_tokens, self.engine.max_length - len(prompt)), seed=seed,
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
            stop_ids=self.chat.stops,
        )  # fmt: skip
        answer = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        try:
            for piece in self._write(request):
                answer["content"] += piece
                yield piece
        finally:
            if not answer["content"]:
                del self.messages[-2:]

    def forget(self) -> None:
        """Begins anew; the system's message stays."""
        self.messages, self.forgotten = [], 0

    def close(self) -> None:
        """Ends the process that renders templates."""
        self._renderer.close()

    def _prompt(self) -> tuple[int, ...]:
        """Renders the messages, without the oldest turns if they'd leave no room for an answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        for start in range(0, len(self.messages), 2):
            text = self.chat.render([*first, *self.messages[start:]], self._renderer)
            tokens = tuple(self.tokenizer.encode_chat(text))
            if len(tokens) + LEAST <= self.engine.max_length:
                self.forgotten = start
                return tokens
        raise UserError(
            f"the message takes {len(tokens):,} tokens, and the model's texts have at most {self.engine.max_length:,}: "
            "write a shorter one"
        )

    def _write(self, request: Request) -> Iterator[str]:
        events: deque[Event] = deque()
        number = self.engine.submit(request, events.append)
        stream, ended = TextStream(self.tokenizer), False
        try:
            while not ended:
                self.engine.step()
                while events:
                    event = events.popleft()
                    if event.token is not None:
                        text, _ = stream.push(event.token)
                        yield text
                    ended = event.finish is not None
                    if event.finish == "error":
                        raise UserError(event.error)
            yield stream.finish()[0]
        finally:
            if not ended:
                self.engine.cancel(number)
                while self.engine.step():
                    pass
