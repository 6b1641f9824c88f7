"""The load of an engine between two steps: what runs, what waits, and the pages that are left."""

from dataclasses import dataclass

from ..decoding.stats import Stats
from .scheduler import Scheduler


@dataclass(frozen=True)
class Load:
    """Use of the engine between two steps."""

    waiting: int
    """Requests that wait entirely: new or preempted ones"""
    running: int
    """Requests that run, at least in part"""
    sequences: int
    """Sequences of running requests"""
    free_pages: int
    """K/V cache pages that a request can get without preemption; with several models, in the fullest cache"""
    cached_pages: int
    """Free pages in the target's cache that hold prefixes for later prompts"""
    total_pages: int
    """Pages of the K/V cache"""
    preemptions: int
    """Number of preemptions so far"""

    @classmethod
    def of(cls, scheduler: Scheduler, stats: Stats) -> "Load":
        """The load now."""
        caches = scheduler.caches
        return cls(
            waiting=scheduler.num_waiting,
            running=len({run.id for run in scheduler.running}),
            sequences=sum(len(run.live.get("target", ())) for run in scheduler.running),
            free_pages=min((cache.free_pages for cache in caches.values()), default=0),
            cached_pages=caches["target"].cached_pages if caches else 0,
            total_pages=min((cache.num_pages for cache in caches.values()), default=0),
            preemptions=stats.preemptions,
        )
