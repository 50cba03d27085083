"""What a sandbox may do: one document, and what each mechanism of the kernel makes of it."""

from sandbox.policy.document import Policy, Protection

__all__ = ["Policy", "Protection"]
