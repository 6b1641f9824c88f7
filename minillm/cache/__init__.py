"""The keys and values of every layer, kept between steps."""

from .paged import PagedCache

__all__ = ["PagedCache"]
