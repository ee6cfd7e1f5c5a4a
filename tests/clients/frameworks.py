#!/usr/bin/env python3
"""Uses a Larder router through `langchain-openai` and `litellm`, unchanged, as applications do.

Usage: frameworks.py BASE_URL        e.g. frameworks.py http://127.0.0.1:8000/v1

Exits 0 if everything holds, 1 with the name of the check that failed. Needs both packages, in the versions of
`.ci/run`. The model may be any: what counts is that both packages understand the answers.
"""

import os
import sys
import traceback

# Neither a proxy nor a list of prices from the network has to do with a local server.
os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

import litellm  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI, OpenAI  # noqa: E402

# Deadline of every request, in seconds. One that takes longer hangs, however busy the machine is.
PATIENCE = 120
# litellm asks `/v1/responses` for no fewer.
TOKENS = 16
BATCH = 20
QUESTION = "How did it begin?"
BODY = {"ignore_eos": True}


@tool
def find_verse(word: str) -> str:
    """Finds a verse with a word."""
    return f"And God said, Let there be {word}."


CALL = {"name": "find_verse", "args": {"word": "light"}, "id": "call_1", "type": "tool_call"}


def lang_chat(api, model, **fields):
    fields = {"temperature": 0, "max_tokens": TOKENS, "extra_body": BODY, **fields}
    return ChatOpenAI(base_url=api, api_key="none", model=model, max_retries=0, timeout=PATIENCE, **fields)


def lang_check_chat(api, model):
    llm = lang_chat(api, model)
    messages = [SystemMessage("You know the Bible."), HumanMessage(QUESTION)]
    whole = llm.invoke(messages)
    usage = whole.usage_metadata
    assert whole.content and usage["output_tokens"] == TOKENS, whole
    assert usage["total_tokens"] == usage["input_tokens"] + TOKENS, usage
    assert usage["input_token_details"]["cache_read"] <= usage["input_tokens"], usage
    streamed = None
    for chunk in lang_chat(api, model, stream_usage=True).stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content, (streamed, whole)
    assert streamed.usage_metadata["output_tokens"] == TOKENS, streamed
    assert streamed.response_metadata["finish_reason"] == "length", streamed


def lang_check_logprobs(api, model):
    answer = lang_chat(api, model, logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == TOKENS and all(len(token["top_logprobs"]) == 2 for token in content), content


def lang_check_tools(api, model):
    llm = lang_chat(api, model).bind_tools([find_verse])
    answer = llm.invoke(QUESTION)
    assert answer.content or answer.tool_calls, answer
    assert not answer.invalid_tool_calls, answer
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[CALL])]
    history.append(ToolMessage(find_verse.invoke(CALL["args"]), tool_call_id="call_1"))
    told = llm.invoke(history)
    assert told.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"], told
    assert "".join(chunk.content for chunk in llm.stream(history)) == told.content, told


def lang_check_batch(api, model):
    llm = lang_chat(api, model)
    prompts = [f"{QUESTION} {n}" for n in range(BATCH)]
    together = llm.batch(prompts, config={"max_concurrency": BATCH})
    assert [answer.content for answer in together] == [llm.invoke(prompt).content for prompt in prompts]
    text = OpenAI(base_url=api, api_key="none", model=model, temperature=0, max_tokens=TOKENS, extra_body=BODY)
    answers = text.generate(prompts)
    assert len(answers.generations) == BATCH, answers
    assert answers.llm_output["token_usage"]["completion_tokens"] == BATCH * TOKENS, answers.llm_output
    assert [text.invoke(prompt) for prompt in prompts[:3]] == [answer[0].text for answer in answers.generations[:3]]


def lang_check_responses(api, model):
    llm = lang_chat(api, model, use_responses_api=True)
    chat = lang_chat(api, model).invoke(QUESTION)
    whole = llm.invoke(QUESTION)
    assert whole.text == chat.content, (whole, chat)
    assert whole.usage_metadata["output_tokens"] == TOKENS, whole
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == chat.content
    history = [HumanMessage(QUESTION), whole, HumanMessage("And then?")]
    history += [AIMessage("", tool_calls=[CALL]), ToolMessage("light", tool_call_id="call_1")]
    assert llm.bind_tools([find_verse], strict=False).invoke(history).usage_metadata["input_tokens"] > 0


def lite(api, model, ask=litellm.completion, **fields):
    fields = {"temperature": 0, "max_tokens": TOKENS, "extra_body": BODY, **fields}
    return ask(model=f"openai/{model}", api_base=api, api_key="none", timeout=PATIENCE, max_retries=0, **fields)


def user(text):
    return [{"role": "user", "content": text}]


def lite_check_chat(api, model):
    whole = lite(api, model, messages=user(QUESTION))
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason == "length", whole
    assert whole.usage.completion_tokens == TOKENS, whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens <= whole.usage.prompt_tokens, whole.usage
    chunks = list(lite(api, model, messages=user(QUESTION), stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text, (streamed, text)
    assert chunks[-1].usage.completion_tokens == TOKENS, chunks[-1]
    plain = lite(api, model, litellm.text_completion, prompt=QUESTION)
    assert plain.choices[0].text and plain.usage.completion_tokens == TOKENS, plain


def lite_check_logprobs(api, model):
    answer = lite(api, model, messages=user(QUESTION), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == TOKENS and all(len(token.top_logprobs) == 2 for token in content), content


def lite_check_tools(api, model):
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "find_verse", "parameters": schema}}]
    answer = lite(api, model, messages=user(QUESTION), tools=tools, tool_choice="auto")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls, answer
    call = {"id": "call_1", "type": "function", "function": {"name": "find_verse", "arguments": '{"word": "light"}'}}
    history = user(QUESTION) + [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "And God said, Let there be light."},
    ]
    told = lite(api, model, messages=history, tools=tools)
    assert told.usage.prompt_tokens > answer.usage.prompt_tokens, told


def lite_check_batch(api, model):
    prompts = [f"{QUESTION} {n}" for n in range(BATCH)]
    together = lite(api, model, litellm.batch_completion, messages=[user(prompt) for prompt in prompts])
    texts = [answer.choices[0].message.content for answer in together]
    alone = [lite(api, model, messages=user(prompt)).choices[0].message.content for prompt in prompts[:3]]
    assert len(texts) == BATCH and texts[:3] == alone, texts


def lite_check_responses(api, model):
    fields = {"input": QUESTION, "max_output_tokens": TOKENS, "max_tokens": None}
    whole = lite(api, model, litellm.responses, **fields)
    text = whole.output[0].content[0].text
    assert text == lite(api, model, messages=user(QUESTION)).choices[0].message.content, whole
    assert whole.usage.output_tokens == TOKENS, whole.usage
    events = list(lite(api, model, litellm.responses, stream=True, **fields))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == text and events[-1].response.status == "incomplete", events[-1]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    import openai

    api = sys.argv[1]
    model = openai.OpenAI(base_url=api, api_key="none", max_retries=0, timeout=PATIENCE).models.list().data[0].id
    checks = [(name, check) for name, check in globals().items() if name.startswith(("lang_check_", "lite_check_"))]
    for name, check in checks:
        try:
            check(api, model)
        except Exception:
            traceback.print_exc()
            sys.exit(f"FAILED: {name}")
        print(f"ok {name}")
    print(f"{len(checks)} checks passed")


if __name__ == "__main__":
    main()
