"""Places in a sandbox, as text."""


def plain(place: str) -> str:
    """An absolute place as the kernel writes it, without needless slashes: rules for one that begins with two
    would match nothing."""
    return "/" + "/".join(filter(None, place.split("/")))


def lies_in(place: str, directory: str) -> bool:
    """Of plain places; none lies in itself."""
    return place.startswith(f"{directory}/")
