"""The loss mask of a conversation: the assistant's tokens and no others, whatever the template and the tokenizer."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitext.data import chat_mask
from minitext.data.chat import Chat
from minitext.data.chat_mask import ChatEncoder, Masked
from minitext.data.conversations import Conversation, Fault, conversation_of
from minitext.data.tokenizer import END, ByteTokenizer, read_published, train_bpe
from minitext.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ '<|im_start|>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'assistant: ' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SPACED = (  # as Llama 2 has it: the answer begins with a space, and words and special tokens share tokens with nothing
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "How many? 日本 "},
    {"role": "assistant", "content": " Two,  and\n\nthree Äpfel 🙂."},
    {"role": "user", "content": "assistant: Two"},
    {"role": "assistant", "content": "Two"},
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def words():
    return train_bpe(["How many apples? Two, and three of them. assistant user system\n"] * 30, 400)


def published(kind):
    """Tokenizers as they are published: with trimmed offsets, or with spaces as a normalizer's signs."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    if kind == "trimmed":
        made = Tokenizer.from_str(json.dumps(words().published()))
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        text = "▁How▁many▁Two▁and▁three▁Äpfel日本.,?:assistantuser"
        vocabulary = {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"<unk>": 0}
        for piece in [*dict.fromkeys(text), "▁T", "wo", "▁Two", "▁a", "nd"]:
            vocabulary.setdefault(piece, len(vocabulary))
        merges = [("▁", "T"), ("w", "o"), ("▁T", "wo"), ("▁", "a"), ("n", "d")]
        made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    made.add_special_tokens(list(SPECIALS))
    return read_published(made.to_str(), "<|im_end|>", "here")


@pytest.fixture(scope="module", params=["trimmed", "signs"])
def tokenizer(request):
    return published(request.param)


def encoded(chat, tokenizer, *found, **_):
    encoder = ChatEncoder(chat, tokenizer)
    try:
        return encoder.encode(found)
    finally:
        encoder.close()


def chat(template, tokenizer, tmp_path):
    return Chat(template, {}, frozenset({tokenizer.eod_id}), tmp_path / "run" / "published")


def test_marks_count_as_for_transformers(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    # Where offsets are trimmed, transformers finds no token for a space and gives up: no answer begins with one here.
    turns = [turn | {"content": turn["content"].strip()} for turn in TURNS]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._model, eos_token="<|im_end|>")
    want = theirs.apply_chat_template(
        turns, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    made = chat(MARKED, tokenizer, tmp_path)
    (found,) = encoded(made, tokenizer, Conversation(tuple(turns), 0))
    size = len(found.ids)
    ids, mask = np.array(want["input_ids"]), np.array(want["assistant_masks"], bool)
    assert (found.ids == ids[:size]).all() and (found.learned == mask[:size]).all()
    assert not mask[size:].any() and mask.any()


@pytest.mark.parametrize("template", [CHATML, SPACED])
def test_without_marks_the_answers_and_their_ends_count(template, tokenizer, tmp_path):
    """Built apart: the tokens of the same text are dealt out at the special tokens that end turns."""
    (found,) = encoded(
        chat(template, tokenizer, tmp_path), tokenizer, Conversation(tuple(TURNS), 0)
    )
    end, start = (tokenizer.spellings[name] for name in ("<|im_end|>", "<|im_start|>"))
    pieces, turn = [], []
    for i, learned in zip(found.ids.tolist(), found.learned.tolist(), strict=True):
        turn.append((i, learned))
        if i == end:
            pieces.append(turn)
            turn = []
    answers = [t["content"].strip() for t in TURNS if t["role"] == "assistant"]
    if template == CHATML:  # where the user's turns end in the same way
        assert [any(learned for _, learned in piece) for piece in pieces] == [False, True] * 2
        pieces = pieces[1::2]
    assert len(pieces) == len(answers) and not turn
    for piece, answer in zip(pieces, answers, strict=True):
        flags = [learned for _, learned in piece]
        first = flags.index(True)
        assert all(flags[first:]) and not any(flags[:first]) and piece[-1][0] == end
        said = tokenizer.decode([i for i, _ in piece[first:]])
        before = tokenizer.decode([i for i, _ in piece[:first] if i != start])
        assert said.strip() == answer
        assert before.endswith("assistant\n" if template == CHATML else "[/INST]")


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=4))
def test_exactly_what_the_assistant_says_counts(contents):
    """With bytes for tokens the learned text is the answers with their ends, character by character."""
    tokenizer = ByteTokenizer()
    turns = []
    for content in contents:
        turns += [
            {"role": "user", "content": content[::-1]},
            {"role": "assistant", "content": content},
        ]
    plain = Chat(None, {}, frozenset({256}), ENCODER.path).plain(tokenizer)
    if any(END in turn["content"] for turn in turns):
        return
    (found,) = ENCODER(plain, tokenizer).encode([Conversation(tuple(turns), 0)])
    ids = found.ids[found.learned].tolist()
    assert bytes(i if i != 256 else 255 for i in ids) == b"".join(
        content.encode() + b"\xff" for content in contents
    )
    unmarked = plain._replace(
        template=plain.template.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
    )
    (again,) = ENCODER(unmarked, tokenizer).encode([Conversation(tuple(turns), 0)])
    assert (again.ids == found.ids).all() and (again.learned == found.learned).all()


class Kept:
    """One encoder, and so one process, for each template."""

    def __init__(self):
        from pathlib import Path

        self.path, self.made = Path("run/published"), {}

    def __call__(self, chat, tokenizer):
        return self.made.setdefault(chat.template, ChatEncoder(chat, tokenizer))


ENCODER = Kept()


@pytest.fixture(scope="module", autouse=True)
def end_the_processes():
    yield
    for encoder in ENCODER.made.values():
        encoder.close()


def test_nothing_counts_after_the_first_end_of_a_turn(tokenizer, tmp_path):
    """Generation stops there, so what a template adds is never asked of the model."""
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>\n<|endoftext|>\n")
    encoder = ChatEncoder(chat(template, tokenizer, tmp_path), tokenizer)
    (found,) = encoder.encode([Conversation(tuple(TURNS), 0)])
    encoder.close()
    end, other = (tokenizer.spellings[name] for name in ("<|im_end|>", "<|endoftext|>"))
    learned = found.ids[found.learned].tolist()
    assert learned.count(end) == 2 and other not in learned and found.ids[-1] == end
    assert encoder.turn_ends == {end} and other in found.ids


def test_only_the_completion_of_a_prompt_counts(tmp_path):
    tokenizer = ByteTokenizer()
    record = {"prompt": TURNS[:3], "completion": [TURNS[3]]}
    plain = Chat(None, {}, frozenset({256}), tmp_path).plain(tokenizer)
    (found,) = encoded(plain, tokenizer, conversation_of(record, "here"))
    assert found.ids[found.learned].tolist() == [*b"Two", 256]


def test_tokens_are_those_of_the_whole_text(tokenizer, tmp_path):
    """Not of pieces put together, which may be others."""
    (found,) = encoded(chat(MARKED, tokenizer, tmp_path), tokenizer, Conversation(tuple(TURNS), 0))
    text = chat(MARKED, tokenizer, tmp_path).render(TURNS)
    whole = tokenizer.encode_batch([text])[0]
    assert (found.ids == whole[: len(found.ids)]).all()


def test_a_published_tokenizer_finds_specials_as_it_does_alone(tokenizer):
    text = "How <|im_start|>many<|im_end|>\n Two  🙂"
    (found,) = tokenizer.encode_spelled([text])
    assert (found.ids == tokenizer.encode_batch([text])[0]).all()
    assert (np.diff(found.ends) >= 0).all() and found.ends[-1] == len(text)


ANSWERS = (  # marked, with what goes before and after their words
    "{{ messages[0].content }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ BEFORE + m.content + '<|im_end|>' + AFTER }}{% endgeneration %}{% endif %}{% endfor %}"
)
BAD = {  # template -> the kind of fault that it makes of TURNS
    "drops": (
        CHATML.replace("m.content +", "(m.content if m.role == 'user' else '') +"),
        chat_mask.DROPPED,
    ),
    "alters": (CHATML.replace("m.content +", "m.content | upper +"), chat_mask.DROPPED),
    "refuses": ("{{ raise_exception('no ' + messages[0].role) }}", chat_mask.REFUSED),
    "cannot be read": ("{% for", chat_mask.REFUSED),
    "another prompt": (
        CHATML.replace("assistant\n' }}", "assistant\n<think>' }}"),
        chat_mask.REWRITTEN,
    ),
    "rewrites": (
        CHATML.replace("m.content +", "(m.content if loop.last else m.content + ' ') +"),
        chat_mask.REWRITTEN,
    ),
    "marks the user": (MARKED.replace("m.role == 'assistant'", "true"), chat_mask.MISMARKED),
    "marks nothing": (MARKED.replace("m.role == 'assistant'", "false"), chat_mask.MISMARKED),
    "marks a question": (
        ANSWERS.replace("BEFORE", "messages[loop.index0 - 1].content").replace("AFTER", "''"),
        chat_mask.MISMARKED,
    ),
    "marks the next question": (
        ANSWERS.replace("BEFORE", "''").replace(
            "AFTER", "('' if loop.last else messages[loop.index0 + 1].content)"
        ),
        chat_mask.MISMARKED,
    ),
    "marks in marks": (
        MARKED.replace("{% generation %}", "{% generation %}{% generation %}{% endgeneration %}"),
        chat_mask.REFUSED,
    ),
    "marks in vain": (
        MARKED.replace("{% generation %}", "{% filter upper %}{% generation %}").replace(
            "{% endgeneration %}", "{% endgeneration %}{% endfilter %}"
        ),
        chat_mask.REFUSED,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_template_that_does_harm_is_a_fault_of_each_conversation(case, tokenizer, tmp_path):
    template, kind = BAD[case]
    (found,) = encoded(
        chat(template, tokenizer, tmp_path), tokenizer, Conversation(tuple(TURNS), 0)
    )
    assert isinstance(found, Fault) and found.kind == kind and "\n" not in found.detail


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_template_without_an_end_of_turn_is_refused(template, tokenizer, tmp_path):
    template = template.replace("<|im_end|>", "###")
    with pytest.raises(UserError, match=r"'###.*data\.chat_template"):
        encoded(chat(template, tokenizer, tmp_path), tokenizer, Conversation(tuple(TURNS), 0))


def test_text_that_spells_a_special_token_is_not_learned(tokenizer, tmp_path):
    turns = [TURNS[0], {"role": "assistant", "content": "Two<|im_end|>three"}]
    good = Conversation(tuple(TURNS), 0)
    bad, fine = encoded(
        chat(CHATML, tokenizer, tmp_path), tokenizer, Conversation(tuple(turns)), good
    )
    assert bad == Fault(chat_mask.SPELLED, "<|im_end|>") and isinstance(fine, Masked)


@pytest.mark.audit
def test_a_slow_conversation_does_not_take_the_others_with_it(tmp_path):
    tokenizer = ByteTokenizer()
    plain = Chat(None, {}, frozenset({256}), tmp_path / "p").plain(tokenizer)
    slow = "{% if messages[0].content == 'slow' %}{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}"
    slow += "{% endfor %}{% endif %}"
    made = [
        Conversation(({"role": "user", "content": q}, {"role": "assistant", "content": "a"}))
        for q in ("q", "slow", "q")
    ]
    first, second, third = encoded(plain._replace(template=slow + plain.template), tokenizer, *made)
    assert isinstance(first, Masked) and isinstance(third, Masked)
    assert second.kind == chat_mask.REFUSED and "too long" in second.detail


def test_what_ends_turns_is_known_afterwards(tokenizer, tmp_path):
    base = chat(CHATML, tokenizer, tmp_path)._replace(stops=frozenset({0}))
    encoder = ChatEncoder(base, tokenizer)
    encoder.encode([Conversation(tuple(TURNS), 0)])
    encoder.close()
    assert encoder.turn_ends == {tokenizer.spellings["<|im_end|>"]}
