"""The KV cache."""

from .paged import PagedCache
from .prefix import PrefixCache
from .states import new_cache
from .windows import Concurrency

__all__ = ["Concurrency", "PagedCache", "PrefixCache", "new_cache"]
