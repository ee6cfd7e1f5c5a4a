#!/usr/bin/env python3
"""Uses a Larder router as its users do: through the `openai` package, unchanged.

Usage: openai_client.py BASE_URL        e.g. openai_client.py http://127.0.0.1:8000/v1

Exits 0 if everything holds, 1 with the name of the check that failed. Needs `pip install openai`.
What must hold above all: greedy answers are the same text whatever way they take (whole, streamed, cached, uncached,
among others at the same time).
"""

import asyncio
import sys
import time
import traceback
import typing
import uuid

import httpx
import openai
import pydantic

# Deadline of every step, in seconds. A step that takes longer hangs, however busy the machine is.
PATIENCE = 120
GREEDY = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
SENTENCE = "In the beginning God created the heaven and the earth, and the earth was without form, and void. "


def fresh_prompt(sentences=20):
    """A prompt that nobody has asked for before, several pages long."""
    return f"[{uuid.uuid4()}] " + SENTENCE * sentences


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


def refused(kind, code, call):
    """`call` must raise `kind` with OpenAI's code `code`."""
    try:
        call()
    except kind as error:
        assert error.code == code, f"code {error.code!r} instead of {code!r}: {error}"
        assert error.body and error.body.get("message"), f"no message in {error.body}"
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def check_models(client, model):
    listed = client.models.list().data
    assert [m.object for m in listed] == ["model"] * len(listed), listed
    assert client.models.retrieve(model).id == model
    refused(openai.NotFoundError, "model_not_found", lambda: client.models.retrieve("no-such-model"))


def check_completion(client, model):
    answer = client.completions.create(model=model, prompt=SENTENCE, **GREEDY)
    choice, usage = answer.choices[0], answer.usage
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-"), answer
    assert choice.index == 0 and choice.finish_reason == "length" and choice.text, choice
    assert usage.completion_tokens == 12 and usage.total_tokens == usage.prompt_tokens + 12, usage
    default = client.completions.create(model=model, prompt=SENTENCE, temperature=0, extra_body={"ignore_eos": True})
    assert default.usage.completion_tokens == 16, "max_tokens is 16 unless said otherwise"


def check_stream_is_the_same_text(client, model):
    prompt = fresh_prompt()
    stream = client.completions.create(
        model=model, prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    whole = client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert text == whole.choices[0].text, f"streamed {text!r}, whole {whole.choices[0].text!r}"
    assert reasons == ["length"], reasons
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 12, chunks[-1]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def check_caches(client, model):
    prompt = fresh_prompt()

    def ask(mode):
        headers = {"x-larder-cache": mode}
        return client.completions.create(model=model, prompt=prompt, extra_headers=headers, **GREEDY)

    uncached, cold, warm, stored = ask("none"), ask("all"), ask("all"), ask("store")
    texts = {answer.choices[0].text for answer in (uncached, cold, warm, stored)}
    assert len(texts) == 1, f"the text depends on the cache: {texts}"
    assert cached(uncached.usage) == 0, uncached.usage
    assert cached(cold.usage) < cached(warm.usage) <= warm.usage.prompt_tokens, (cold.usage, warm.usage)
    # Engines publish in the background: the last page may come after the answer.
    deadline = time.monotonic() + PATIENCE
    while cached(stored.usage) != cached(warm.usage):
        assert time.monotonic() < deadline, (stored.usage, warm.usage)
        stored = ask("store")
        assert stored.choices[0].text in texts, f"the text depends on the cache: {stored.choices[0].text}"
    refused(openai.BadRequestError, None, lambda: ask("sometimes"))


def check_many_prompts(client, model):
    prompts = [SENTENCE, SENTENCE * 2, "And God said, "]
    answer = client.completions.create(model=model, prompt=prompts, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2], answer.choices
    for prompt, choice in zip(prompts, answer.choices):
        alone = client.completions.create(model=model, prompt=prompt, **GREEDY)
        assert alone.choices[0].text == choice.text, (prompt, choice.text)
    tokens = [5 + i % 50 for i in range(100)]
    by_ids = client.completions.create(model=model, prompt=tokens, **GREEDY)
    assert by_ids.usage.prompt_tokens == 100, by_ids.usage
    both = client.completions.create(model=model, prompt=[tokens, tokens], **GREEDY)
    assert {choice.text for choice in both.choices} == {by_ids.choices[0].text}


def check_chat(client, model):
    messages = [
        {"role": "developer", "content": "You know the Bible."},
        {"role": "user", "content": [{"type": "text", "text": "How did it begin?"}]},
    ]
    whole = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    message = whole.choices[0].message
    assert whole.object == "chat.completion" and message.role == "assistant", whole
    chunks = list(client.chat.completions.create(model=model, messages=messages, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == message.content, f"streamed {text!r}, whole {message.content!r}"
    older = [{"role": "system", "content": messages[0]["content"]}, {"role": "user", "content": "How did it begin?"}]
    again = client.chat.completions.create(
        model=model, messages=older, temperature=0, max_completion_tokens=12, extra_body={"ignore_eos": True}
    )
    assert again.choices[0].message.content == message.content, "developer and system are one role"
    turn = older + [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(model=model, messages=turn, **GREEDY).usage.prompt_tokens > 0


TOOL = {
    "name": "find_verse",
    "description": "Finds a verse.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


def check_tools(client, model):
    """The model is not trained to call tools, so its answer may be text. What counts is the form."""
    tools = [{"type": "function", "function": TOOL}]
    messages = [{"role": "user", "content": "How did it begin?"}]
    auto = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="auto", **GREEDY)
    choice = auto.choices[0]
    calls = choice.message.tool_calls or []
    assert choice.message.content or calls, choice
    for call in calls:
        assert call.type == "function" and call.id and call.function.name, call
    chunks = list(
        client.chat.completions.create(model=model, messages=messages, tools=tools, stream=True, **GREEDY)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == (choice.message.content or ""), (text, choice)
    none = client.chat.completions.create(model=model, messages=messages, tools=tools, tool_choice="none", **GREEDY)
    plain = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert none.choices[0].message.content == plain.choices[0].message.content, "`none` hides the tools"
    call = {"id": "call_1", "type": "function", "function": {"name": "find_verse", "arguments": '{"word": "light"}'}}
    history = messages + [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "And God said, Let there be light."},
    ]
    told = client.chat.completions.create(model=model, messages=history, tools=tools, **GREEDY)
    assert told.usage.prompt_tokens > auto.usage.prompt_tokens, "the history reaches the model"
    wrong = [{**history[1], "tool_calls": [{**call, "function": {"name": "find_verse", "arguments": "no JSON"}}]}]
    refused(
        openai.BadRequestError,
        None,
        lambda: client.chat.completions.create(model=model, messages=messages + wrong, tools=tools, **GREEDY),
    )


def check_responses(client, model):
    extra = {"extra_body": {"ignore_eos": True}, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(model=model, instructions="You know the Bible.", input="How did it begin?", **extra)
    messages = [
        {"role": "system", "content": "You know the Bible."},
        {"role": "user", "content": "How did it begin?"},
    ]
    chat = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert whole.output_text == chat.choices[0].message.content, (whole, chat)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens", whole
    assert whole.usage.output_tokens == 12 and whole.usage.input_tokens == chat.usage.prompt_tokens, whole.usage
    assert 0 <= whole.usage.input_tokens_details.cached_tokens <= whole.usage.input_tokens, whole.usage
    assert not whole.store and whole.instructions == "You know the Bible.", whole

    # An answer that ends by itself, which the helper of the package waits for.
    stop = whole.output_text[4:6]
    ends = {**extra, "extra_body": {"ignore_eos": True, "stop": [stop]}}
    with client.responses.stream(model=model, input=messages, **ends) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.status == "completed", final
    assert final.output_text == whole.output_text[: whole.output_text.index(stop)], (final, whole)
    assert events[0].type == "response.created" and events[-1].type == "response.completed", events
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == final.output_text, deltas
    cut = list(client.responses.create(model=model, input=messages, stream=True, **extra))
    assert [event.sequence_number for event in cut] == list(range(len(cut))), cut
    assert cut[-1].type == "response.incomplete" and cut[-1].response.output_text == whole.output_text, cut[-1]

    tools = [{"type": "function", **TOOL, "strict": False}]
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "How did it begin?"}]},
        *[item.model_dump(exclude_none=True) for item in whole.output],
        {"type": "function_call", "call_id": "call_1", "name": "find_verse", "arguments": '{"word": "light"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "And God said, Let there be light."},
    ]
    told = client.responses.create(model=model, input=history, tools=tools, **extra)
    assert told.output and told.usage.input_tokens > whole.usage.input_tokens, told
    assert [tool.name for tool in told.tools] == ["find_verse"], told.tools
    for field, value in [("previous_response_id", whole.id), ("store", True), ("truncation", "auto")]:
        refused(
            openai.BadRequestError,
            "unsupported_value",
            lambda: client.responses.create(model=model, input="a", **{field: value}),
        )


def check_sampling(client, model):
    def sample(seed, n=1):
        answer = client.completions.create(
            model=model, prompt=SENTENCE, temperature=1.5, top_p=0.95, seed=seed, n=n, max_tokens=16
        )
        return [choice.text for choice in answer.choices]

    assert sample(7) == sample(7), "a seed gives the same text again"
    assert len({text for seed in range(6) for text in sample(seed)}) > 1, "seeds differ"
    assert sample(7, n=3)[0] == sample(7)[0], "the first choice has the seed itself"
    assert len(sample(7, n=3)) == 3


def check_logprobs(client, model):
    prompt = [5 + i % 50 for i in range(40)]
    whole = client.completions.create(model=model, prompt=prompt, logprobs=2, **GREEDY).choices[0]
    logprobs = whole.logprobs
    assert "".join(logprobs.tokens) == whole.text and len(logprobs.token_logprobs) == 12, whole
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        assert len(top) == 2 and own == max(top.values()) <= 0, (own, top)
    # As lm-evaluation-harness asks for the log-likelihood of a text. It must be that of the generation.
    ids = client.completions.create(model=model, prompt=prompt, logprobs=0, echo=True, max_tokens=0).choices[0]
    assert len(ids.logprobs.tokens) == 40 and ids.logprobs.token_logprobs[0] is None, ids
    text = SENTENCE * 3
    echoed = client.completions.create(
        model=model, prompt=text, logprobs=1, echo=True, max_tokens=1, temperature=0
    ).choices[0]
    assert echoed.text.startswith(text), echoed.text
    assert len(echoed.logprobs.tokens) == len(echoed.logprobs.text_offset)
    batch = client.completions.create(model=model, prompt=[text] * 20, logprobs=1, echo=True, max_tokens=1, temperature=0)
    assert all(choice.logprobs == echoed.logprobs for choice in batch.choices), "it depends on the batch"
    messages = [{"role": "user", "content": "How did it begin?"}]
    chat = client.chat.completions.create(model=model, messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == 12 and all(len(token.top_logprobs) == 3 for token in content), content
    spoken = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    assert spoken == chat.choices[0].message.content, (spoken, chat)


def check_penalties(client, model):
    free = client.completions.create(model=model, prompt=SENTENCE, logprobs=0, **GREEDY).choices[0]
    bias = {"300": 100}
    forced = client.completions.create(model=model, prompt=SENTENCE, logprobs=0, logit_bias=bias, **GREEDY).choices[0]
    assert len(set(forced.logprobs.tokens)) == 1, forced
    extra = {"ignore_eos": True, "repetition_penalty": 10.0}
    varied = client.completions.create(
        model=model, prompt=SENTENCE, temperature=0, max_tokens=12, logprobs=0, presence_penalty=2, extra_body=extra
    ).choices[0]
    assert len(set(varied.logprobs.tokens)) == 12, varied
    assert varied.logprobs.tokens != free.logprobs.tokens
    best = client.completions.create(model=model, prompt=SENTENCE, n=2, best_of=4, max_tokens=4, temperature=1)
    assert len(best.choices) == 2 and best.usage.completion_tokens <= 16, best


def check_stop(client, model):
    full = client.completions.create(model=model, prompt=SENTENCE, **GREEDY).choices[0].text
    assert len(full) >= 6, f"too short to cut: {full!r}"
    stop = full[3:5]
    for stops in (stop, ["\x00never\x00", stop]):
        cut = client.completions.create(model=model, prompt=SENTENCE, stop=stops, **GREEDY).choices[0]
        expected = full[: full.index(stop)]
        assert cut.text == expected and cut.finish_reason == "stop", (cut, full, stop)


def check_stop_tokens(client, model):
    plain = httpx.Client(trust_env=False, timeout=PATIENCE, base_url=str(client.base_url).removesuffix("v1/"))
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    ids = plain.post("generate", json={"text": SENTENCE, "sampling_params": params}).json()["output_ids"]
    first = ids.index(ids[4]) + 1

    def tokens(**extra):
        extra = {"ignore_eos": True, "stop_token_ids": [ids[4]], **extra}
        answer = client.completions.create(
            model=model, prompt=SENTENCE, temperature=0, max_tokens=12, logit_bias={str(ids[4]): 50}, extra_body=extra
        )
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    greedy = client.completions.create(
        model=model,
        prompt=SENTENCE,
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True, "stop_token_ids": [ids[4]]},
    )
    assert greedy.usage.completion_tokens == first and greedy.choices[0].finish_reason == "stop", (greedy, ids)
    assert tokens() == (1, "stop"), "the bias selects the stop token at once"
    assert tokens(min_tokens=9) == (10, "stop"), "and the minimum withholds it"


class Pet(pydantic.BaseModel):
    kind: typing.Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=99)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    pets: list[Pet] = pydantic.Field(max_length=2)


def check_structured_output(client, model):
    chat = {"model": model, "messages": [{"role": "user", "content": "Who was it?"}], "max_tokens": 400}
    for seed in range(5):
        parsed = client.chat.completions.parse(**chat, response_format=Person, temperature=1.5, seed=seed)
        assert isinstance(parsed.choices[0].message.parsed, Person), parsed
    for number in client.completions.create(
        model=model, prompt=SENTENCE, n=4, temperature=1, extra_body={"guided_regex": "[0-9]{3}"}
    ).choices:
        assert len(number.text) == 3 and number.text.isdigit() and number.finish_reason == "stop", number
    stream = client.chat.completions.create(
        **chat, temperature=1, seed=3, stream=True, extra_body={"guided_choice": ["yes", "no"]}
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text in ("yes", "no"), text
    answer = client.chat.completions.create(**(chat | {"max_tokens": 3}), response_format={"type": "json_object"})
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content[0] == "{", answer


def check_required_tools(client, model):
    """Needs a model or a router with a format of tool calls."""
    tools = [openai.pydantic_function_tool(Person, name="save"), openai.pydantic_function_tool(Pet, name="feed")]
    chat = {"model": model, "messages": [{"role": "user", "content": "Do it."}], "max_tokens": 400, "tools": tools}
    named = {"type": "function", "function": {"name": "feed"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(**chat, tool_choice=choice, temperature=1, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        kind = {"save": Person, "feed": Pet}[call.function.name]
        kind.model_validate_json(call.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls", answer
    assert call.function.name == "feed", call
    fixed = chat | {"tool_choice": named, "temperature": 1, "seed": 3, "parallel_tool_calls": False}
    (call,) = client.chat.completions.create(**fixed).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fixed, stream=True)]
    head, *rest = [entry for chunk in chunks for entry in chunk.delta.tool_calls or []]
    assert (head.index, head.type, head.function.name, head.function.arguments) == (0, "function", "feed", ""), head
    assert head.id and all((entry.index, entry.id, entry.function.name) == (0, None, None) for entry in rest), rest
    assert len(rest) > 1, "the arguments come as the model writes them"
    assert "".join(entry.function.arguments for entry in rest) == call.function.arguments, (rest, call)
    assert chunks[-1].finish_reason == "tool_calls", chunks[-1]
    # The helper of the package joins the parts, and validates the result.
    with client.chat.completions.stream(**fixed) as stream:
        (joined,) = stream.get_final_completion().choices[0].message.tool_calls
    assert joined.function.arguments == call.function.arguments and joined.function.parsed_arguments, joined


def check_errors(client, model):
    def complete(**fields):
        fields = {"model": model, "prompt": "a", "max_tokens": 1, **fields}
        return lambda: client.completions.create(**fields)

    refused(openai.NotFoundError, "model_not_found", complete(model="no-such-model"))
    refused(openai.BadRequestError, "context_length_exceeded", complete(prompt=[5] * 200_000))
    refused(openai.BadRequestError, "context_length_exceeded", complete(max_tokens=100_000_000))
    refused(openai.BadRequestError, "unknown_parameter", complete(extra_body={"guided_rgex": "a"}))
    refused(openai.BadRequestError, None, complete(extra_body={"guided_regex": "("}))
    refused(openai.BadRequestError, None, complete(logprobs=21))
    refused(openai.BadRequestError, None, complete(logit_bias={"1000000": 1}))
    refused(openai.BadRequestError, None, complete(temperature=9))
    refused(openai.BadRequestError, None, complete(n=200))
    refused(openai.BadRequestError, None, complete(prompt=[]))
    refused(openai.BadRequestError, None, complete(prompt=[2**31]))
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "colour"}}}
    refused(openai.BadRequestError, None, lambda: client.chat.completions.create(**chat, response_format=wrong))
    refused(openai.NotFoundError, "unknown_url", lambda: client.embeddings.create(model=model, input="a"))
    plain = httpx.Client(trust_env=False, timeout=PATIENCE)
    answer = plain.post(f"{client.base_url}completions", content=b"{not json")
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text


def check_monitors(client, model):
    plain = httpx.Client(trust_env=False, timeout=PATIENCE, base_url=str(client.base_url).removesuffix("v1/"))
    for path in ("health", "ready", "metrics"):
        assert plain.get(path).status_code == 200, path
    assert "# TYPE larder_router_requests_total counter" in plain.get("metrics").text
    ids = plain.post("tokenize", json={"prompt": SENTENCE}).json()
    assert ids["count"] == len(ids["tokens"]) > 10, ids
    assert SENTENCE in plain.post("detokenize", json={"tokens": ids["tokens"]}).json()["text"]
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    native = plain.post("generate", json={"text": SENTENCE, "sampling_params": params}).json()
    assert native["text"] == client.completions.create(model=model, prompt=SENTENCE, **GREEDY).choices[0].text
    assert len(native["output_ids"]) == native["meta_info"]["completion_tokens"] == 12, native
    prompt = fresh_prompt()
    client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert plain.post("flush_cache").status_code == 200
    again = client.completions.create(model=model, prompt=prompt, **GREEDY)
    assert again.sglext["cached_tokens_details"]["device"] == 0, again


def check_request_ids(client, model):
    given = client.completions.with_raw_response.create(
        model=model, prompt="a", max_tokens=1, extra_headers={"x-request-id": "check-1"}
    )
    assert given.headers["x-request-id"] == "check-1", given.headers
    made = client.completions.with_raw_response.create(model=model, prompt="a", max_tokens=1)
    assert made.headers["x-request-id"], made.headers


def check_leaving_early(client, model):
    stream = client.completions.create(
        model=model, prompt=SENTENCE, stream=True, temperature=0, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.completions.create(model=model, prompt=SENTENCE, **GREEDY).choices[0].text


def check_many_at_once(client, model):
    prompts = [fresh_prompt(3 + i) for i in range(8)]

    async def all_at_once():
        async with openai.AsyncOpenAI(
            base_url=client.base_url,
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, timeout=PATIENCE),
        ) as together:
            asks = [together.completions.create(model=model, prompt=prompt, **GREEDY) for prompt in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*asks)]

    texts = asyncio.run(all_at_once())
    for prompt, text in zip(prompts, texts):
        alone = client.completions.create(model=model, prompt=prompt, **GREEDY).choices[0].text
        assert alone == text, f"among others {text!r}, alone {alone!r}"


CHECKS = [
    check_models,
    check_completion,
    check_stream_is_the_same_text,
    check_caches,
    check_many_prompts,
    check_chat,
    check_tools,
    check_responses,
    check_sampling,
    check_logprobs,
    check_penalties,
    check_stop,
    check_stop_tokens,
    check_structured_output,
    check_required_tools,
    check_errors,
    check_monitors,
    check_request_ids,
    check_leaving_early,
    check_many_at_once,
]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    # The environment's proxies are none of a local server's business; retries would hide failures.
    client = openai.OpenAI(
        base_url=sys.argv[1],
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE),
    )
    models = client.models.list().data
    if not models:
        sys.exit(f"{sys.argv[1]} lists no model")
    for check in CHECKS:
        try:
            check(client, models[0].id)
        except Exception:
            traceback.print_exc()
            sys.exit(f"FAILED: {check.__name__} (openai {openai.__version__})")
        print(f"ok {check.__name__}")
    print(f"{len(CHECKS)} checks passed with openai {openai.__version__}")


if __name__ == "__main__":
    main()
