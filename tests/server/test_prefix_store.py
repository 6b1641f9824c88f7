"""Servers that keep the prefixes of their texts in a folder."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from minillm import Engine
from minillm.server import make_app

from .client import listening

LONG = np.random.default_rng(1).integers(3, 2000, 400).tolist()


def answered(url: str, prompts: Sequence[list[int]]) -> list[tuple[str, int]]:
    """The texts of greedy completions that are asked for at the same time, and how many tokens the cache had."""

    def ask(prompt: list[int]) -> tuple[str, int]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def test_a_server_finds_after_a_restart_what_it_has_computed(tmp_path: Path) -> None:
    counts, texts = [], []
    for _ in range(2):
        with listening(make_app(Engine(prefix_store=tmp_path))) as url:  # closes the engine, which writes what waits
            [(text, cached)] = answered(url, [LONG])
            texts.append(text)
            counts.append(cached)
    assert counts == [0, 384] and texts[0] == texts[1]


@pytest.mark.slow
def test_two_servers_on_one_folder_answer_as_each_does_alone(tmp_path: Path) -> None:
    prompts = [LONG, [*LONG[:300], 9], LONG[:280], [7, *LONG]]
    with Engine() as engine:
        expected = [engine.generate(prompt, max_new_tokens=6, eos_token_id=[]).text for prompt in prompts]
    page = 6 * 2 * 192 * 128 * 4
    one, other = (make_app(Engine(prefix_store=tmp_path, prefix_store_bytes=5 * page + page // 2)) for _ in range(2))
    with listening(one) as url, listening(other) as other_url, ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            for answers in pool.map(answered, (url, other_url), (prompts, prompts[::-1])):
                assert sorted(text for text, _ in answers) == sorted(expected)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 0 < len(sizes) <= 5 and sum(sizes) <= 5 * page + page // 2
