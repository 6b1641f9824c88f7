"""The KV cache."""

from .paged import PagedCache, affordable_pages
from .prefix import PrefixCache

__all__ = ["PagedCache", "PrefixCache", "affordable_pages"]
