"""The format of the K/V cache that `cache_dtype="weights"`, a server's default, takes from the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.distributed.communicator import Communicator
from minillm.distributed.threads import run_ranks
from minillm.errors import DeviceError, RankError, UsageError
from minillm.parallel import Parallel

from ..families import CONFIGS
from ..task_models import BERT, write_task_model
from ..tiny import write_checkpoint
from .test_prefix_files import write_like

LINE = np.random.default_rng(0).integers(3, 500, 200).tolist()
SIZE = {"num_hidden_layers": 4, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("opt"), **SIZE)


def cache_format(model: Any, **options: Any) -> str:
    """The format of an engine's cache by its name, which its arrays have too."""
    with Engine(model, **{"backend": "cpu", "cache_dtype": "weights"} | options) as engine:
        form = engine.runner.backend.memory.cache
        assert {array.dtype for array in engine.runner.cache.storage.arrays.values()} == {form.dtype}
        return form.name


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"dtype": "int4"}, "bfloat16"),
        ({"dtype": "int8", "cache_dtype": "float32"}, "float32"),
        ({"dtype": "int8", "cache_dtype": "auto"}, "float32"),
        ({"dtype": "int8", "backend": "numpy"}, "float32"),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else value,
)
def test_weights_of_at_most_16_bits_have_a_cache_of_16(folder: Path, options: dict[str, str], expected: str) -> None:
    assert cache_format(folder, **options) == expected


def test_a_helper_model_follows_the_model(folder: Path) -> None:
    with Engine(folder, draft=folder, backend="cpu", dtype="int8", cache_dtype="weights") as engine:
        caches = [runner.cache for runner in engine._driver.loop.runners.values()]
        assert len(caches) == 2 and all(cache.storage.keys.data.dtype == np.uint16 for cache in caches)


def test_an_encoder_keeps_float32(tmp_path: Path) -> None:
    """Its keys and values take turns in the memory of one layer, and rounding them would change its vectors."""
    texts = ["the cat sat on the mat", "how are you ?"]
    write_task_model(tmp_path, BERT)
    vectors = []
    for cache_dtype in ("weights", "float32"):
        with Engine(tmp_path, backend="cpu", dtype="float16", cache_dtype=cache_dtype) as engine:
            assert engine.runner.backend.memory.cache.name == "float32"
            vectors.append(engine.embed(texts))
    np.testing.assert_array_equal(*vectors)


def test_the_answer_is_nearly_that_of_a_wide_cache(folder: Path) -> None:
    """Rounded to 8 bits, keys and values move the logits, and a little only."""
    logits = []
    for cache_dtype in ("float32", "weights"):
        with Engine(folder, backend="cpu", dtype="float16", cache_dtype=cache_dtype) as engine:
            logits.append(engine.forward(LINE))
    assert 0 < np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max() < 0.02


def test_a_saved_prefix_in_float32_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "line.safetensors"
    with Engine(folder, backend="cpu", dtype="float16") as engine:
        engine.save_prefix(path, LINE)
    with (
        Engine(folder, backend="cpu", dtype="float16", cache_dtype="weights") as engine,
        pytest.raises(UsageError, match="a K/V cache in 'float32', and this engine has a K/V cache in 'bfloat16'"),
    ):
        engine.load_prefix(path)


@pytest.mark.longer
def test_a_folder_of_prefixes_in_float32_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """Pages of another format have other names: they are not read, and those of a wide cache are still there after."""
    prompt, hits = LINE + LINE[::-1], []
    folder = write_checkpoint(tmp_path / "long", **SIZE | {"max_position_embeddings": 512})
    for cache_dtype in ("float32", "weights", "float32", "weights"):
        options: dict[str, Any] = {"backend": "cpu", "dtype": "float16", "prefix_store": tmp_path / "store"}
        with Engine(folder, cache_dtype=cache_dtype, **options) as engine:
            hits.append(engine.generate(prompt, max_new_tokens=2).cached_tokens)
    assert hits == [0, 0, 384, 384]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (CONFIGS["youtu"]["tied"], r"cache_dtype 'int4' is not for latent attention \(youtu\): take 'int8'"),
        (
            CONFIGS["llama"]["grouped"] | {"head_dim": 1032, "num_attention_heads": 1, "num_key_value_heads": 1},
            r"cache_dtype 'int4' is not for heads of 1032 numbers \(llama\)",
        ),
    ],
)
def test_4_bits_are_refused_by_name_where_vectors_cannot_be_rotated(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_like(tmp_path, fields | {"vocab_size": 512, "max_position_embeddings": 512})
    with pytest.raises(DeviceError, match=says):
        Engine(tmp_path, backend="cpu", cache_dtype="int4")


@pytest.mark.longer
@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 24, "prefix_cache": False}, {"cache_bytes": 1 << 17}])
def test_tokens_of_a_cache_of_4_bits_are_those_of_a_text_alone(folder: Path, options: dict[str, Any]) -> None:
    """In chunks, beside others, and where texts wait for pages that others have, and are computed again."""
    prompts = [LINE[i : i + 40 + 7 * i] for i in range(6)]
    settings: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    with Engine(folder, backend="cpu", cache_dtype="int4", deterministic=True) as engine:
        alone = [engine.generate(prompt, **settings).token_ids for prompt in prompts]
    with Engine(folder, backend="cpu", cache_dtype="int4", deterministic=True, **options) as engine:
        together = [answer.token_ids for answer in engine.generate(prompts, **settings)]
    assert together == alone


# --- processes that share a model -------------------------------------------------------------------------------------


def formats_on_ranks(folder: Path, *cache_dtypes: str) -> list[str]:
    """The format of the cache of each stage of a pipeline."""

    def work(communicator: Communicator) -> str:
        options: dict[str, Any] = {"backend": "cpu", "cache_bytes": 1 << 24, "threads": 1}
        options["cache_dtype"] = cache_dtypes[communicator.rank]
        parallel = Parallel(pipeline=2)
        with Engine(folder, parallel=parallel, communicator=communicator, **options) as engine:
            if engine._follower is None:
                return engine.runner.backend.memory.cache.name
            backend = engine._follower.part.backend
            return backend.memory.cache.name

    return run_ranks(2, work)


@pytest.mark.parametrize(("narrow", "expected"), [((0, 1, 2, 3), "bfloat16"), ((0, 1), "float32")], ids=["all", "some"])
def test_all_ranks_have_the_format_of_the_widest_stage(tmp_path: Path, narrow: tuple[int, ...], expected: str) -> None:
    def round_layers(tensors: dict[str, np.ndarray]) -> None:
        for name, tensor in tensors.items():
            if "layers" not in name or int(name.split(".")[1]) in narrow:
                tensors[name] = tensor.astype(np.float16)

    folder = write_checkpoint(tmp_path / "opt", change=round_layers, ffn_dim=400, **SIZE)  # layers outweigh the head
    assert formats_on_ranks(folder, "weights", "weights") == [expected] * 2


def test_ranks_that_were_told_otherwise_are_named(folder: Path) -> None:
    with pytest.raises(RankError, match="rank 1 has cache_dtype float32, rank 0 has weights"):
        formats_on_ranks(folder, "weights", "float32")
