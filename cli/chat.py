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
    effort: Annotated[
        str | None, typer.Option(help="How much to think: low, medium, high, …, or 1 to 100.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Talk to a served model; the reply comes as it is produced, and dimmed what the model thinks before it.

    Example: dockyard chat "Write a Python function that adds two numbers"
    """
    from cli.chat_stream import ChatStream  # brings httpx
    from cluster.status import required_url

    endpoint = required_url(load_config(model=model), url)
    messages: list[dict[str, str]] = []
    settings: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    if effort is not None:
        settings["reasoning_effort"] = int(effort) if effort.isdecimal() else effort
    with ChatStream(endpoint, settings) as stream:
        for said in [message] if message is not None else _lines():
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": _reply(stream, messages, quiet=as_json)})
    if as_json:
        print_json({"messages": messages})


def _reply(stream: "ChatStream", messages: list[dict[str, str]], *, quiet: bool) -> str:
    """What is said. Thoughts go to stderr, or nowhere when it is `quiet`."""
    parts: list[str] = []
    has_thought = False
    for piece in stream.reply(messages):
        if piece.is_thought:
            has_thought = True
            if not quiet:
                progress.print(visible(piece.text), end="", markup=False, style="dim")
            continue
        if has_thought and not parts and not quiet:
            progress.print()
        parts.append(piece.text)
        if not quiet:
            output.print(visible(piece.text), end="", markup=False)
    if not quiet:
        output.print()
    if has_thought and not parts:
        progress.print("the model thought to the end; give more --max-tokens, or less --effort")
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
