"""The KV cache."""

from .paged import PagedCache
from .prefix import PrefixCache
from .windows import Concurrency

__all__ = ["Concurrency", "PagedCache", "PrefixCache"]
