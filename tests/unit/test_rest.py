"""Answers of the REST API on a real socket, over an engine without a model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai
import pytest

from tests.helpers.fake_engine import ANSWER, CARD, FakeEngine
from tests.helpers.rest_gateway import HELLO, Gateway, error_of, events
from tests.helpers.tiny_tokenizer import IM_END, IM_START, tiny_tokenizer_files

pytestmark = pytest.mark.asyncio(loop_scope="module")
pytest_plugins = ["tests.helpers.rest_fixtures"]

RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
PROMPT_TOKENS = 21  # of RENDERED: 3 special ones, and the bytes


# --- whole answers and streams, read by OpenAI's client ---


async def test_chat(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="org/tiny", messages=HELLO, seed=5)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", f"{ANSWER}0")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == len(f"{ANSWER}0".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    [request] = gateway.engine.requests
    assert list(request.prompt_ids) == gateway.tokenizer().encode(RENDERED)


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="org/tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == f"{ANSWER}0"
    assert "�" not in text
    roles = [chunk.choices[0].delta.role for chunk in chunks if chunk.choices]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(f"{ANSWER}0".encode()) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="org/tiny", prompt="a<|im_end|>", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")
    assert answer.object == "text_completion"
    assert gateway.engine.requests[0].prompt_ids == (97, IM_END)


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="org/tiny", prompt=[1, 2], stop="세", stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == "Hello, "
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([5, 258], [(5, 258)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
async def test_forms_of_a_prompt(gateway: Gateway, prompt: object, expected: list[tuple[int, ...]]) -> None:
    response = await gateway.post({"prompt": prompt}, "/v1/completions")
    assert [request.prompt_ids for request in gateway.engine.requests] == expected
    assert len(response.json()["choices"]) == len(expected)


async def test_choices_are_of_one_seed_and_come_apart(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="org/tiny", prompt=["ab", "c"], n=2)
    samplings = [request.sampling for request in gateway.engine.requests]
    assert [sampling.choice_index for sampling in samplings] == [0, 1, 0, 1]
    assert len({sampling.seed for sampling in samplings}) == 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [f"{ANSWER}{i}" for i in (0, 1, 0, 1)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 4 * (len(f"{ANSWER}0".encode()) + 1)


async def test_choices_in_a_stream(gateway: Gateway) -> None:
    body = {"messages": HELLO, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await gateway.post(body))
    texts = ["", "", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [f"{ANSWER}{i}" for i in range(3)]
    assert sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]) == [0, 1, 2]
    assert last["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert last["usage"]["completion_tokens"] == 3 * (len(f"{ANSWER}0".encode()) + 1)


async def test_parameters_reach_the_engine(gateway: Gateway) -> None:
    body = {
        "model": "org/tiny",
        "messages": HELLO,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 2**64 - 1,
        "max_completion_tokens": 7,
        "stop": ["x", "yz"],
        "eyas": {"num_draft_tokens": 5},
    }
    await gateway.post(body, traceparent="00-abc-def-01", **{"X-Request-Id": "my-id"})
    [request] = gateway.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, 2**64 - 1)
    assert (request.max_tokens, request.stop, request.num_draft_tokens) == (7, ("x", "yz"), 5)
    assert (request.traceparent, request.request_id) == ("00-abc-def-01", "my-id")


async def test_defaults(gateway: Gateway) -> None:
    responses = [await gateway.post({"messages": HELLO, "top_k": -1}) for _ in range(2)]
    first, second = gateway.engine.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert first.max_tokens == 128 - PROMPT_TOKENS
    assert (first.stop, first.num_draft_tokens, first.traceparent) == ((), 3, "")
    assert sampling.seed != second.sampling.seed
    assert responses[0].json()["eyas"]["seed"] == sampling.seed < 2**53
    assert responses[0].headers["x-request-id"] == first.request_id != second.request_id


async def test_a_chat_gets_no_second_bos(gateway: Gateway) -> None:
    """The template writes its own; plain text has the tokenizer's."""
    files = tiny_tokenizer_files()
    spec = json.loads(files["tokenizer.json"])
    bos = {"id": "<|im_start|>", "ids": [IM_START], "tokens": ["<|im_start|>"]}
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {"<|im_start|>": bos},
    }
    gateway.engine = FakeEngine(tokenizer_files=files | {"tokenizer.json": json.dumps(spec).encode()})
    await gateway.post({"messages": HELLO})
    await gateway.post({"prompt": "hi"}, "/v1/completions")
    chat, plain = (request.prompt_ids for request in gateway.engine.requests)
    assert chat[:2] == (IM_START, ord("u"))
    assert plain == (IM_START, *b"hi")


async def test_text_parts_and_names_reach_the_template(gateway: Gateway) -> None:
    files = tiny_tokenizer_files()
    config = {"chat_template": "{{ messages[0].name }}:{{ messages[0].content }}"}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    gateway.engine = FakeEngine(tokenizer_files=files)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await gateway.post({"messages": [{"role": "user", "name": "Kim", "content": parts}]})
    assert bytes(gateway.engine.requests[0].prompt_ids) == b"Kim:a\nb"


async def test_fields_that_change_nothing_are_taken(gateway: Gateway) -> None:
    neutral = {"logprobs": False, "tools": [], "n": 1, "presence_penalty": 0.0, "logit_bias": None}
    ignored = {"user": "me", "store": True, "metadata": {"a": "b"}, "unheard_of": 1, "stop": None}
    message = HELLO[0] | {"tool_calls": None, "refusal": None}
    response = await gateway.post({"messages": [message], "stream": None} | neutral | ignored)
    assert response.status_code == 200


# --- Eyas's own object ---


@pytest.mark.parametrize(
    ("eyas", "expected"),
    [({"speculation": False}, 0), ({"num_draft_tokens": 0}, 0), ({"speculation": True}, 3)],
)
async def test_speculation_can_be_switched(gateway: Gateway, eyas: dict[str, Any], expected: int) -> None:
    response = await gateway.post({"messages": HELLO, "seed": 3, "eyas": eyas})
    assert gateway.engine.requests[0].num_draft_tokens == expected
    assert response.json()["choices"][0]["message"]["content"] == f"{ANSWER}0"


async def test_summary(gateway: Gateway) -> None:
    body = {"messages": HELLO, "seed": 7, "max_tokens": 8}
    summary = (await gateway.post(body)).json()["eyas"]
    assert summary == {
        "seed": 7,
        "speculation": {
            "num_rounds": 2,
            "num_drafts": 2,
            "num_draft_tokens": 6,
            "num_accepted_tokens": 6,
            "acceptance_length": 4.0,
        },
        "times_ms": {"queue": 1.0, "draft": 2.0, "target": 3.0, "wire": 4.0, "gateway": 5.0},
    }
    plain = events(await gateway.post(body | {"stream": True}))
    with_usage = events(await gateway.post(body | {"stream": True, "stream_options": {"include_usage": True}}))
    for chunks in (plain, with_usage):
        assert [chunk.get("eyas") for chunk in chunks] == [None] * (len(chunks) - 1) + [summary]


async def test_no_acceptance_length_without_drafts(gateway: Gateway) -> None:
    response = await gateway.post({"messages": HELLO, "eyas": {"speculation": False}})
    assert response.json()["eyas"]["speculation"]["acceptance_length"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_provenance_of_every_token(gateway: Gateway, stream: bool) -> None:
    body = {"messages": HELLO, "n": 2, "stream": stream, "eyas": {"provenance": True}}
    response = await gateway.post(body)
    objects = events(response) if stream else [response.json()]
    tokens = [token for part in objects for token in part.get("eyas", {}).get("tokens", [])]
    for index in range(2):
        mine = [token for token in tokens if token["choice"] == index]
        ids = [*f"{ANSWER}{index}".encode(), IM_END]
        assert [token["id"] for token in mine] == ids
        assert [token["round"] for token in mine] == [i // 4 for i in range(len(ids))]
        ends = [i % 4 == 3 or i == len(ids) - 1 for i in range(len(ids))]
        assert [token["source"] for token in mine] == ["target" if end else "draft" for end in ends]
        assert "".join(token["text"] for token in mine) == f"{ANSWER}{index}"


async def test_a_stop_token_that_has_text_shows_none(gateway: Gateway) -> None:
    gateway.engine.served = dataclasses.replace(CARD, eos_token_ids=frozenset(b","))
    answer = (await gateway.post({"messages": HELLO, "eyas": {"provenance": True}})).json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert [token["text"] for token in answer["eyas"]["tokens"]] == [*"Hello", ""]


async def test_chunks_without_text_are_left_out(gateway: Gateway) -> None:
    """A stop string is held back whole, and a character until its last byte."""
    response = await gateway.post({"messages": HELLO, "stop": "세계 😀!X", "stream": True})
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in events(response)]
    assert contents == ["", "Hell", "o, ", "세계 😀!0", None]


# --- models, health, metrics ---


async def test_models(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    assert [model.id async for model in client.models.list()] == ["org/tiny"]
    assert (await client.models.retrieve("org/tiny")).created == 1700000000
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    assert (await gateway.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_health(gateway: Gateway) -> None:
    assert (await gateway.get("/health")).status_code == 200
    gateway.healthy = False
    response = await gateway.get("/health")
    assert response.status_code == 503
    assert error_of(response)["code"] == "service_unavailable"


async def test_metrics_and_version(gateway: Gateway) -> None:
    response = await gateway.get("/metrics")
    assert response.text == "eyas_rounds_total 7.0\n"
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert (await gateway.get("/version")).json() == {"version": "1.2.3"}
