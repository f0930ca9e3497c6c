"""Text to tokens and back: the target's tokenizer, and the text of a growing answer."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from eyas.errors import EyasError
from gateway.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class TokenizerError(EyasError):
    """A tokenizer file is missing or broken; names the file."""


class Tokenizer:
    """The tokenizer of a checkpoint, made from its files (name -> content).

    Needs tokenizer.json; reads tokenizer_config.json and chat_template.jinja where they are given. Raises
    TokenizerError.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        spec = _load_json(files, TOKENIZER_FILE)
        config = _load_json(files, CONFIG_FILE) if CONFIG_FILE in files else {}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{TOKENIZER_FILE}: {error}") from error
        # A checkpoint may carry limits from its training; here nothing is cut or filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoders = frozenset(_decoder_types(spec.get("decoder")))
        self._pieces: dict[int, bytes] = {}
        self._chat_template = ChatTemplate(_template_source(files, config), _special_tokens(config))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised. `add_special_tokens` lets the
        tokenizer's post-processor add its own (bos); a rendered chat has them already."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a whole sequence, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's chat template writes it. Raises ChatTemplateError."""
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def piece(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text that is under way; none for special and unknown ones."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find_piece(token_id)
        return piece

    def _find_piece(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if "ByteLevel" in self._decoders:
            return _byte_level_piece(token)
        if "ByteFallback" in self._decoders and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        # Decoders of the SentencePiece kind strip the space of the first token, so it must not be the first.
        return self.decode([self._anchor, token_id]).removeprefix(self.decode([self._anchor])).encode()

    @cached_property
    def _anchor(self) -> int:
        return self.encode("a", add_special_tokens=False)[-1]


class TextStream:
    """The text of a growing token sequence, in O(1) a token.

    What `push` and `flush` return, joined, is what decoding the whole continuation gives. A character whose
    bytes are spread over tokens comes out with the last of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes."""
        return self._utf8.decode(self._piece(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for every byte (GPT-2): printable Latin-1 stands for itself, the other bytes,
    in order, for the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_level_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    nested = [name for part in decoder.get("decoders", []) for name in _decoder_types(part)]
    return [decoder["type"], *nested]


def _load_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files[name])
    except KeyError:
        raise TokenizerError(f"{name} is missing from the target's checkpoint") from None
    except ValueError as error:
        raise TokenizerError(f"{name}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{name}: a JSON object is expected")
    return content


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The file of its own comes first; tokenizer_config.json has one template, or a list with names."""
    if TEMPLATE_FILE in files:
        return files[TEMPLATE_FILE].decode()
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, each a string or an object with `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
