"""What the text must be, by `response_format`, vLLM's `structured_outputs`, or tools that must be called."""

import json
from collections.abc import Iterator

import msgspec

from engine.chat.tool_grammar import Form, Signature, tool_grammar
from engine.errors import InvalidRequest
from gateway.chat_body import ChatBody, Function, NamedTool
from gateway.sampling_body import ResponseFormat, SamplingBody, StructuredOutputs, clipped
from protocol.sampling import Structure

_MOST_TOOLS = 1024


def read_structure(body: SamplingBody, form: Form | None = None) -> Structure | None:
    """`form`: of the calls that a chat may demand.

    Raises InvalidRequest: unknown kinds, more than one demand. The engine says what cannot be compiled.
    """
    asked = [*_of_format(body.response_format), *_of_outputs(body.structured_outputs)]
    if isinstance(body, ChatBody) and form is not None:
        asked += _of_tools(body, form)
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[1].field} and {asked[0].field} both say what the text must be",
            parameter=asked[1].field, hint="leave one of them out",
        )  # fmt: skip
    return asked[0] if asked else None


def read_functions(body: ChatBody) -> list[Function]:
    """The functions of `tools`. Raises InvalidRequest for what is none."""
    tools = body.tools or []
    if len(tools) > _MOST_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} of them; at most {_MOST_TOOLS}", parameter="tools")
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest(
                f"tools[{index}] is of type {clipped(tool.type)!r}; this server calls functions",
                parameter=f"tools[{index}]", hint='send {"type": "function", "function": {"name": …}}',
            )  # fmt: skip
        functions.append(tool.function)
    return functions


def callable_functions(body: ChatBody) -> list[Function]:
    """Those that the reply may call: none without tools, or where `tool_choice` says so."""
    functions, choice = read_functions(body), body.tool_choice
    if isinstance(choice, NamedTool):
        name = choice.function.name if choice.function is not None else ""
        found = [function for function in functions if function.name == name]
        if choice.type != "function" or not found:
            raise InvalidRequest(
                f"tool_choice names {clipped(name or choice.type)!r}, which is no function of tools",
                parameter="tool_choice", hint="name one of: " + clipped(", ".join(f.name for f in functions)),
            )  # fmt: skip
        return found
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest(
            f"tool_choice is {clipped(choice)!r}; it must be none, auto, required or a function",
            parameter="tool_choice",
        )
    if choice == "required" and not functions:
        raise InvalidRequest(
            "tool_choice is 'required', and there are no tools", parameter="tool_choice", hint="send tools"
        )
    return [] if choice == "none" else functions


def _of_format(asked: ResponseFormat | None) -> Iterator[Structure]:
    if asked is None or asked.type == "text":
        return
    match asked.type:
        case "json_object":
            yield Structure("json_object")
        case "json_schema":
            if asked.json_schema is None or asked.json_schema.schema is None:
                raise InvalidRequest(
                    "response_format.json_schema has no schema", parameter="response_format.json_schema",
                    hint='send {"name": …, "schema": {…}}',
                )  # fmt: skip
            source = _json(asked.json_schema.schema)
            yield Structure("json_schema", source, "response_format.json_schema.schema")
        case "structural_tag":
            tag = {"type": "structural_tag", "format": asked.format}
            yield Structure("structural_tag", _json(tag), "response_format.format")
        case _:
            raise InvalidRequest(
                f"response_format.type is {clipped(asked.type)!r}; it must be text, json_object, json_schema"
                " or structural_tag",
                parameter="response_format.type",
            )


def _of_outputs(asked: StructuredOutputs | None) -> Iterator[Structure]:
    if asked is None:
        return
    where = "structured_outputs"
    if asked.json is not None:
        source = asked.json if isinstance(asked.json, str) else _json(asked.json)
        yield Structure("json_schema", source, f"{where}.json")
    if asked.json_object:
        yield Structure("json_object", field=f"{where}.json_object")
    if asked.regex is not None:
        yield Structure("regex", asked.regex, f"{where}.regex")
    if asked.grammar is not None:
        yield Structure("grammar", asked.grammar, f"{where}.grammar")
    if asked.structural_tag is not None:
        yield Structure("structural_tag", asked.structural_tag, f"{where}.structural_tag")
    if asked.choice is not None:
        if not asked.choice or "" in asked.choice:
            raise InvalidRequest(f"{where}.choice has an empty text, or none", parameter=f"{where}.choice")
        literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        yield Structure("grammar", f"root ::= {literals}", f"{where}.choice")


def _of_tools(body: ChatBody, form: Form) -> Iterator[Structure]:
    """Calls are demanded, and then nothing but calls; `auto` leaves the text free and reads it."""
    functions = callable_functions(body)
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        signatures = [Signature(function.name, function.parameters) for function in functions]
        several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
        yield Structure("structural_tag", tool_grammar(signatures, form, several=several), "tools")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
