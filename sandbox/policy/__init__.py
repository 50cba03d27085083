"""What a sandbox may do: one document, and what each mechanism of the kernel makes of it."""

from sandbox.policy.document import Policy, Protection
from sandbox.policy.network import Destination, Names, Network

__all__ = ["Destination", "Names", "Network", "Policy", "Protection"]
