"""The KV cache."""

from .paged import PagedCache
from .prefix import PrefixCache
from .states import new_cache

__all__ = ["PagedCache", "PrefixCache", "new_cache"]
