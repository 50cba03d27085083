"""chat: talk to a served model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import JsonFlag, UrlOption, output, print_json, progress
from cluster.config import load_config
from protocol.visible_text import visible

if TYPE_CHECKING:
    from cli.chat_stream import ChatStream


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
    from cli.chat_stream import ChatStream  # brings httpx
    from cluster.status import required_url

    endpoint = required_url(load_config(model=model), url)
    messages: list[dict[str, str]] = []
    settings: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    with ChatStream(endpoint, settings) as stream:
        for said in [message] if message is not None else _lines():
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": _reply(stream, messages, quiet=as_json)})
    if as_json:
        print_json({"messages": messages})


def _reply(stream: "ChatStream", messages: list[dict[str, str]], *, quiet: bool) -> str:
    parts: list[str] = []
    for text in stream.reply(messages):
        parts.append(text)
        if not quiet:
            output.print(visible(text), end="", markup=False)
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
