"""HTML and SVG elements as values. Whatever is not `Html` already is escaped: forgetting it is impossible."""

from dataclasses import dataclass
from html import escape

from protocol.visible_text import visible


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that needs no escaping any more. Made by `tag` and `join`, and from constants of ours."""

    markup: str


Child = Html | str | int
_VOID = frozenset({"meta", "br", "hr"})


def text(value: str | int) -> Html:
    """A value as text of a document, with hidden characters made visible."""
    return Html(escape(visible(str(value))))


def join(*children: Child) -> Html:
    """The children one after the other."""
    return Html("".join(c.markup if isinstance(c, Html) else text(c).markup for c in children))


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. In attribute names `_` stands for `-`, and a last one is dropped (`class_`).

    True gives an attribute without value; False and None leave it out. Floats have two decimals.
    """
    opened = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    if name in _VOID:
        return Html(opened)
    return Html(f"{opened}{join(*children).markup}</{name}>")


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{escape(visible(shown))}"'
