"""A byte-level tokenizer whose ids are the bytes themselves, with a ChatML template."""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gateway.text import byte_level_alphabet

END_OF_TEXT = 256  # the second end-of-sequence id
IM_START = 257
IM_END = 258  # eos
VOCAB_SIZE = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer_files() -> dict[str, bytes]:
    """Files of a tokenizer with 259 tokens: id b for byte b, then <|endoftext|>, <|im_start|>, <|im_end|>."""
    backend = Backend(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE}
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}).encode(),
    }
