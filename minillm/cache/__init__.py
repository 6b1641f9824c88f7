"""The KV cache."""

from .paged import PagedCache
from .prefix import PrefixCache

__all__ = ["PagedCache", "PrefixCache"]
