"""chat: talk to a served model."""

from collections.abc import Iterator
from typing import Annotated

import typer
from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

from cli.console import JsonFlag, UrlOption, output, print_json, progress
from cluster.config import load_config
from cluster.status import required_url
from protocol.errors import DockyardError
from teams.report.wording import visible


class ChatFailed(DockyardError):
    """The endpoint answered with an error."""


def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it, a conversation.")] = None,
    url: UrlOption = None,
    model: Annotated[str, typer.Option(help="Model name.")] = "smollm2",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each reply.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 takes the most likely token.")
    ] = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Talk to a served model; the reply comes as it is produced.

    Example: dockyard chat "Write a Python function that adds two numbers"
    """
    endpoint = required_url(load_config(model=model), url)
    client = OpenAI(base_url=f"{endpoint}/v1", api_key="dk-chat", max_retries=0)
    messages: list[ChatCompletionMessageParam] = []
    for said in [message] if message is not None else _lines():
        messages.append({"role": "user", "content": said})
        reply = _reply(client, messages, model, max_tokens, temperature, quiet=as_json)
        messages.append({"role": "assistant", "content": reply})
    if as_json:
        print_json({"messages": messages})


def _reply(
    client: OpenAI,
    messages: list[ChatCompletionMessageParam],
    model: str,
    max_tokens: int,
    temperature: float,
    *,
    quiet: bool,
) -> str:
    parts: list[str] = []
    try:
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=max_tokens, temperature=temperature, stream=True
        )
        for chunk in stream:
            text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
            parts.append(text)
            if not quiet:
                output.print(visible(text), end="", markup=False)
    except OpenAIError as error:
        raise ChatFailed(str(error), hint="dockyard status shows what is running") from error
    if not quiet:
        output.print()
    return "".join(parts)


def _lines() -> Iterator[str]:
    progress.print("[dim]an empty line or Ctrl-D ends the conversation[/dim]")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line
