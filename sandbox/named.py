"""What things of a sandbox show of themselves."""


class Named:
    """Shows its id, and nothing that may be secret: `<RunningCommand 3>`, `<Sandbox sbx-3f9a61c04be2d17>`."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {getattr(self, 'id', '?')}>"
