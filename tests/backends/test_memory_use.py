"""The memory that is available, as Linux says it of a machine and of a container."""

from pathlib import Path

import pytest

from minillm.backends import memory_use


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="of Linux")
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files do not count as used: they are given up first."""
    monkeypatch.setattr(memory_use, "CGROUP", tmp_path)
    total, free = memory_use.total_memory(), memory_use.free_memory()
    assert 0 < free <= total
    (tmp_path / "memory.current").write_text("90000000\n")
    (tmp_path / "memory.stat").write_text("anon 60000000\nfile 30000000\nkernel 0\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_use.total_memory() == total
    assert memory_use.free_memory() > 1 << 27
    (tmp_path / "memory.max").write_text("100000000\n")
    assert memory_use.total_memory() == 100_000_000
    assert memory_use.free_memory() == 40_000_000
    (tmp_path / "memory.max").write_text("50000000\n")
    assert memory_use.free_memory() == 0


def test_without_the_line_that_says_it_all_memory_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "_numbers", lambda path: {})
    assert memory_use.free_memory() == memory_use.total_memory()
