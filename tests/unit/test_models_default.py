"""The default target, fetched and converted for real: transformers computes the continuation known for it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.default_model import default_target

# Greedy, by transformers' own GGUF reader: weights rounded to bfloat16, computed in float32.
QUESTION = "Why is the sky blue?"
PROMPT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
PROMPT += f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = (
    "The answer to this question lies in the intricate dance of light and color. The sky appears blue because"
)
ANSWER_IDS = [504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380]
ANSWER_IDS += [30, 378, 6376, 4541, 4461, 975]
# fmt: off
ANSWER_LOGITS = [
    30.9754, 17.4905, 29.2552, 15.6351, 19.6603, 30.9998, 29.3382, 20.6783, 19.0879, 22.5484,
    32.6884, 22.8213, 31.4328, 23.6335, 28.1923, 14.7174, 18.6809, 28.0551, 23.4648, 28.0516,
]
# fmt: on


def test_logits_and_greedy_continuation() -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_target())
    model = AutoModelForCausalLM.from_pretrained(default_target(), dtype=torch.float32)
    chat = [{"role": "user", "content": QUESTION}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == PROMPT
    prompt = tokenizer.encode(PROMPT)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ANSWER_IDS])).logits[0, len(prompt) - 1 : -1]
    assert tokenizer.decode(ANSWER_IDS) == ANSWER
    assert logits.argmax(-1).tolist() == ANSWER_IDS
    torch.testing.assert_close(logits.amax(-1), torch.tensor(ANSWER_LOGITS), atol=1e-3, rtol=0)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2


def test_tokenizer_round_trips_and_splits_digits() -> None:
    tokenizer = Tokenizer.from_file(str(default_target() / "tokenizer.json"))
    texts = [
        "Hello, world",
        "안녕하세요 세계",
        "emoji 😀👩‍👩‍👧",
        "  two\n\n\ttabs  ",
        "don't naïve “quotes” ①②½ ٣٤",
        PROMPT,
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("In 2024, 3.14").tokens == [
        "In",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        ",",
        "Ġ",
        "3",
        ".",
        "1",
        "4",
    ]
    assert [tokenizer.encode(token).ids for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        [0],
        [1],
        [2],
    ]
