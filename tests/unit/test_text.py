"""The tokenizer, the chat template and the text of a growing answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from gateway.chat_template import ChatTemplateError
from gateway.text import TextStream, Tokenizer, TokenizerError
from tests.helpers.tiny_tokenizer import END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE, tiny_tokenizer_files

TINY = Tokenizer(tiny_tokenizer_files())
CORPUS = ["안녕하세요 세계", "hello world, hello there", "naïve café 😀😃👩‍👩‍👧"] * 3


def files_of(backend: tokenizers.Tokenizer, **config: Any) -> dict[str, bytes]:
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def trained_byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with merges, so that tokens hold whole, half and several characters; an added token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool 한>", special=False), AddedToken("é", special=False)])
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama-2's kind: words begin with U+2581, characters without a token fall back to bytes."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
        "세",
    ]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    return backend


BYTE_LEVEL = Tokenizer(files_of(trained_byte_level()))
SENTENCEPIECE = Tokenizer(files_of(sentencepiece_like()))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


# --- encoding ---


def test_special_tokens_in_the_text_are_recognised() -> None:
    assert TINY.encode("a<|im_end|>b") == [97, IM_END, 98]
    assert TINY.vocab_size == VOCAB_SIZE


def test_only_the_post_processor_adds_bos_and_a_chat_does_without() -> None:
    backend = trained_byte_level()
    template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.post_processor = template
    tokenizer = Tokenizer(files_of(backend))
    assert tokenizer.encode("h")[0] == 0
    assert 0 not in tokenizer.encode("h", add_special_tokens=False)
    assert 0 not in BYTE_LEVEL.encode("h")


def test_limits_stored_in_the_file_cut_and_fill_nothing() -> None:
    backend = trained_byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    text = "hello world, hello there"
    assert Tokenizer(files_of(backend)).encode(text) == BYTE_LEVEL.encode(text)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": b"{"}, "tokenizer.json"),
        ({"tokenizer.json": b"[]"}, "tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json"),
        (tiny_tokenizer_files() | {"tokenizer_config.json": b"nonsense"}, "tokenizer_config.json"),
    ],
)
def test_broken_files_are_named(files: dict[str, bytes], named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        Tokenizer(files)


# --- text stream ---


@given(st.text())
def test_stream_equals_full_decode_bytes_one_by_one(text: str) -> None:
    ids = TINY.encode(text)
    assert "".join(streamed(TINY, ids)) == TINY.decode(ids)


@given(st.lists(st.integers(0, VOCAB_SIZE + 3)))
def test_stream_equals_full_decode_on_arbitrary_ids(ids: list[int]) -> None:
    """Broken UTF-8, special tokens and ids behind the vocabulary included."""
    assert "".join(streamed(TINY, ids)) == TINY.decode(ids)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size)))
def test_stream_equals_full_decode_with_merges_and_added_tokens(ids: list[int]) -> None:
    assert "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("text", ["안녕", "😀", "👩‍👩‍👧 naïve"])
def test_unfinished_characters_are_held_back(text: str) -> None:
    parts = streamed(TINY, TINY.encode(text))
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)
    assert all(len(part) <= 1 for part in parts)


def test_flush_shows_a_character_cut_off_by_the_end() -> None:
    assert streamed(TINY, TINY.encode("가")[:2]) == ["", "", "�"]


def test_special_tokens_are_not_shown() -> None:
    assert "".join(streamed(TINY, [97, IM_START, 98, IM_END, END_OF_TEXT])) == "ab"


@given(st.text(alphabet="ab 세é😀", min_size=1), st.text(alphabet="ab 세é😀"))
def test_sentencepiece_stream_continues_the_prompt(prompt: str, answer: str) -> None:
    """The space that begins a word survives, though decoding the answer alone would strip it."""
    ids = SENTENCEPIECE.encode(prompt + answer)
    cut = len(SENTENCEPIECE.encode(prompt))
    while SENTENCEPIECE.decode(ids[:cut]).endswith("�"):
        cut += 1  # the answer begins at a whole character
    head = SENTENCEPIECE.decode(ids[:cut])
    assert head + "".join(streamed(SENTENCEPIECE, ids[cut:])) == SENTENCEPIECE.decode(ids)


def test_sentencepiece_byte_fallback_is_held_back_until_whole() -> None:
    ids = [SENTENCEPIECE.encode("a😀")[-4:], SENTENCEPIECE.encode("ab")[-1:]]
    assert streamed(SENTENCEPIECE, [*ids[0], *ids[1]]) == ["", "", "", "😀", " ab", ""]


# --- chat template ---

CHAT = [{"role": "system", "content": "Be brief. <b>"}, {"role": "user", "content": "안녕 'quoted'"}]
TEMPLATES = {
    "chatml": json.loads(tiny_tokenizer_files()["tokenizer_config.json"])["chat_template"],
    "whitespace": """
        {% for m in messages %}
            {% if loop.index0 == 3 %}{% break %}{% endif %}
            {{- bos_token }}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}
        {% endfor %}
        {%- if add_generation_prompt %}
        [assistant]
        {% endif %}
    """,
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools is none }}{{ pad_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_template_renders_as_transformers_does(name: str, add_generation_prompt: bool) -> None:
    backend = trained_byte_level()
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATES[name]}
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = TEMPLATES[name]
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add_generation_prompt)
    ours = Tokenizer(files_of(backend, **config))
    assert ours.render_chat(CHAT, add_generation_prompt=add_generation_prompt) == expected


def test_template_file_comes_before_the_config_and_a_list_has_a_default() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    files = files_of(trained_byte_level(), chat_template=named)
    assert Tokenizer(files).render_chat(CHAT) == "plain"
    assert Tokenizer(files | {"chat_template.jinja": b"file"}).render_chat(CHAT) == "file"


def test_strftime_now_gives_the_date() -> None:
    rendered = Tokenizer(files_of(trained_byte_level(), chat_template="{{ strftime_now('%Y') }}")).render_chat(
        CHAT
    )
    assert rendered.isdigit()
    assert len(rendered) == 4


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ([{"name": "tool_use", "template": ""}], "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "rejects the messages"),
        ("{% nonsense %}", "nonsense"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_chat_that_cannot_be_rendered_says_why(template: object, message: str) -> None:
    tokenizer = Tokenizer(files_of(trained_byte_level(), chat_template=template))
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.render_chat(CHAT)
