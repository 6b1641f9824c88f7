"""Prefixes in files: another process goes on with the same bits, and a file that does not fit is refused by name."""

import asyncio
import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.backends.loader import RandomTensor
from minillm.errors import CacheFullError, MinillmError, ParameterError, TaskError, UsageError
from minillm.models import build_of, config_of
from minillm.models.building import tensor_shapes

from .. import seq2seq, task_models
from ..adapters import write_adapter
from ..async_engines import running
from ..families import CONFIGS
from ..models import test_llama
from ..tiny import NO_REPEATS, TOKENIZER, std_of, write_checkpoint

LINE = np.random.default_rng(0).integers(3, 500, 300).tolist()
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "top_logprobs": 4, "eos_token_id": [], **NO_REPEATS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("opt"), seed=2, max_position_embeddings=512)


def write_like(folder: Path, raw: dict[str, Any]) -> None:
    """A checkpoint of a config.json, by published names, with random weights, and the small tokenizer."""
    shapes = tensor_shapes(build_of(config_of(raw)), config_of(raw), as_built=False)
    tensors = {name: RandomTensor(name, shape, 0, std_of(name, raw)).load() for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path | None]:
    """The model in the package, a tiny Llama, and a tiny model with latent attention."""
    llama = tmp_path_factory.mktemp("llama")
    write_like(llama, test_llama.CONFIG | {"vocab_size": 512, "max_position_embeddings": 512})
    latents = tmp_path_factory.mktemp("latents")
    write_like(latents, CONFIGS["youtu"]["tied"] | {"vocab_size": 512, "max_position_embeddings": 512})
    return {"packaged": None, "llama": llama, "opt": folder, "latents": latents}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Path]:
    """A file of the tiny OPT on NumPy."""
    path = tmp_path_factory.mktemp("saved") / "line.safetensors"
    with Engine(folder, backend="numpy") as engine:
        engine.save_prefix(path, LINE)
    yield path


def said(engine: Engine, prompt: list[int], **fields: Any) -> tuple[list[int], Any]:
    """The tokens of a text and their log-probabilities, to the last bit."""
    result = engine.generate(prompt, **GREEDY | fields).completions[0]
    return result.token_ids, result.top_logprobs


def content(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The metadata of a file, and the bytes of its tensors."""
    with safe_open(path, "np") as file:
        return file.metadata(), {name: array.tobytes() for name, array in load_file(path).items()}


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "options", "length"),
    [
        ("packaged", {"backend": "cpu"}, 300),
        ("packaged", {"backend": "numpy"}, 140),
        *(("llama", {"backend": backend}, length) for backend in ("cpu", "numpy") for length in (300, 256, 1)),
        ("llama", {"dtype": "int4"}, 300),
        ("latents", {"backend": "numpy"}, 300),
        ("latents", {"backend": "cpu"}, 300),
        ("latents", {"backend": "cpu", "cache_dtype": "int8"}, 300),
        ("opt", {"backend": "cpu", "cache_dtype": "int8"}, 300),
        ("llama", {"backend": "cpu", "cache_dtype": "int4"}, 300),
        ("opt", {"backend": "cpu", "cache_dtype": "bfloat16"}, 300),
    ],
)
def test_a_text_goes_on_with_the_bits_that_the_saving_process_has(
    models: dict[str, Path | None], name: str, options: dict[str, Any], length: int, tmp_path: Path
) -> None:
    path, model, prompt = tmp_path / "line.safetensors", models[name], [*LINE[:length], 7]
    with Engine(model, **options) as engine:
        written = engine.save_prefix(path, LINE[:length])
        expected = said(engine, prompt)
    with Engine(model, **options) as engine:
        assert engine.load_prefix(path) == written
        assert said(engine, prompt) == expected
        assert (engine.stats.cached_tokens, engine.stats.prefill_tokens) == (length, 1)
    with Engine(model, **options) as engine:
        computed = engine.save_prefix(tmp_path / "again.safetensors", LINE[:length])
        assert computed == written
        assert said(engine, prompt)[0] == expected[0]
    assert content(tmp_path / "again.safetensors") == content(path)


@pytest.mark.longer
def test_a_restored_text_says_what_one_without_any_cache_does(folder: Path, saved: Path) -> None:
    with Engine(folder, backend="numpy") as engine, Engine(folder, backend="numpy", prefix_cache=False) as plain:
        engine.load_prefix(saved)
        for length in (1, 127, 128, 129, 299, 300):
            prompt = [*LINE[:length], 9, 10]
            tokens, logprobs = said(engine, prompt)
            others, computed = said(plain, prompt)
            assert tokens == others
            for row, expected in zip(logprobs, computed, strict=True):
                assert [token for token, _ in row] == [token for token, _ in expected]
                np.testing.assert_allclose([p for _, p in row], [p for _, p in expected], rtol=0, atol=1e-4)
        assert engine.stats.prefill_tokens == 6 * 2


@pytest.mark.longer
def test_strangers_in_the_batch_are_not_changed_and_change_nothing(folder: Path, saved: Path) -> None:
    prompts = [[*LINE, 7], [40, 41, 42], [*LINE[:200], 9], LINE[5:90]]
    with Engine(folder, backend="numpy") as engine:
        alone = [engine.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    with Engine(folder, backend="numpy", max_batch_size=4) as engine:
        engine.load_prefix(saved)
        assert [result.token_ids for result in engine.generate(prompts, **GREEDY)] == alone
        assert engine.stats.cached_tokens >= 300 + 200


def test_a_prefix_is_loaded_while_others_run(folder: Path, saved: Path) -> None:
    with Engine(folder, backend="numpy", max_batch_size=2) as engine:
        alone = engine.generate([50, 51], **GREEDY).token_ids
        tokens, request = [], engine.add([50, 51], **GREEDY)
        for step in range(100):
            if step == 3:
                engine.load_prefix(saved)
            tokens += [token for event in engine.step() for token in event.token_ids]
            if not engine.busy:
                break
        assert tokens == alone and request
        said(engine, [*LINE, 7])
        assert engine.stats.cached_tokens >= 300


def test_nothing_is_computed_that_the_cache_has_and_nothing_stays_in_use(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, backend="numpy") as engine:
        engine.generate(LINE, max_new_tokens=1)
        before = engine.stats.prefill_tokens
        assert engine.save_prefix(tmp_path / "a.safetensors", LINE).tokens == 300
        assert engine.stats.prefill_tokens == before
        engine.save_prefix(tmp_path / "b.safetensors", [*LINE, 1, 2])
        assert engine.stats.prefill_tokens == before + 2
        engine.load_prefix(tmp_path / "b.safetensors")
        engine.load_prefix(tmp_path / "b.safetensors")
        assert engine.load().free_pages == engine.load().total_pages
        assert engine.load().cached_pages == 3


def test_other_texts_are_not_in_the_file(folder: Path, tmp_path: Path) -> None:
    path, page = tmp_path / "short.safetensors", 2 * 2 * 32 * 128 * 4
    with Engine(folder, backend="numpy", cache_bytes=3 * page) as engine:  # the second page is not copied, but used
        engine.generate(LINE, max_new_tokens=1)
        engine.save_prefix(path, LINE[:140])
    tensors = load_file(path)
    assert tensors["keys"].shape[1:4:2] == (2, 128)
    for name in ("keys", "values"):
        assert tensors[name][:, 1, :, :12].all() and not tensors[name][:, 1, :, 12:].any()


def test_notes_and_text_prompts(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "notes.safetensors"
    prefix = engine.save_prefix(str(path), "A list of colors", notes={"about": "colours, grün"})
    assert prefix.notes == {"about": "colours, grün"} == engine.load_prefix(path).notes
    assert prefix.tokens == len(engine.tokenizer.encode("A list of colors"))
    with pytest.raises(ParameterError, match="notes should be a dict of texts by name, found"):
        engine.save_prefix(path, "A", notes={"a": 1})  # type: ignore[dict-item]


# --- adapters and helper models ---------------------------------------------------------------------------------------


@pytest.mark.longer
def test_a_prefix_belongs_to_its_adapter_whatever_that_is_called(folder: Path, tmp_path: Path) -> None:
    one, two = (write_adapter(tmp_path / name, seed=i) for i, name in enumerate(("one", "two")))
    path = tmp_path / "line.safetensors"
    with Engine(folder, backend="numpy", adapters={"a": one, "b": two}) as engine:
        assert engine.save_prefix(path, LINE, lora="a").lora == "a"
        expected = said(engine, [*LINE, 7], lora="a")
        with pytest.raises(ParameterError, match="lora='c': the engine has no adapter of this name"):
            engine.save_prefix(path, LINE, lora="c")
    with Engine(folder, backend="numpy", adapters={"x": two, "y": one}) as engine:
        assert engine.load_prefix(path).lora == "y"
        assert said(engine, [*LINE, 7], lora="y") == expected
        assert engine.stats.cached_tokens == 300
        said(engine, [*LINE, 7], lora="x")
        said(engine, [*LINE, 7])
        assert engine.stats.cached_tokens == 300
    with Engine(folder, backend="numpy", adapters={"x": two}) as engine, pytest.raises(UsageError) as refused:
        engine.load_prefix(path)
    assert "was computed with a LoRA adapter that this engine has not: save it anew" in str(refused.value)


@pytest.mark.longer
def test_a_draft_computes_its_own(folder: Path, saved: Path) -> None:
    with Engine(folder, backend="numpy") as engine:
        expected = engine.generate([*LINE, 7], **GREEDY).token_ids
    with Engine(folder, backend="numpy", draft=folder) as engine:
        engine.load_prefix(saved)
        assert engine.generate([*LINE, 7], **GREEDY).token_ids == expected
        assert engine.stats.cached_tokens == 300


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_a_file_of_another_origin_is_refused_by_what_differs(folder: Path, saved: Path, tmp_path: Path) -> None:
    def scale(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.fc2.weight"][3, 5] += 0.25  # one number of one layer

    size = {"max_position_embeddings": 512}
    changed = write_checkpoint(tmp_path / "changed", seed=2, change=scale, **size)
    adapter = write_adapter(tmp_path / "adapter")
    another = "another model, or other weights of this one"
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (folder, {"backend": "cpu"}, "backend 'numpy', and this engine has backend 'cpu'"),
        (folder, {"dtype": "int8"}, "weights in 'float32', and this engine has weights in 'int8'"),
        (changed, {}, another),
        (folder, {"adapter": adapter}, another),
        (write_checkpoint(tmp_path / "seed", seed=3, **size), {}, another),
        (write_checkpoint(tmp_path / "relu", seed=2, activation_function="gelu", **size), {}, another),
    ]
    for model, options, reason in cases:
        with Engine(model, **{"backend": "numpy"} | options) as engine:
            with pytest.raises(UsageError) as refused:
                engine.load_prefix(saved)
            assert str(refused.value) == f"{saved} was computed with {reason}: save it anew with this engine"
            assert engine.load().cached_pages == 0


def test_another_format_of_the_cache_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "line.safetensors"
    with Engine(folder, backend="cpu", cache_dtype="int8") as engine:
        engine.save_prefix(path, LINE)
    with (
        Engine(folder, backend="cpu") as engine,
        pytest.raises(UsageError, match="a K/V cache in 'int8', and this engine has a K/V"),
    ):
        engine.load_prefix(path)


def test_another_page_size_is_refused(folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minillm.backends.memory.Memory.page_size", 64)
    with Engine(folder, backend="numpy") as engine, pytest.raises(UsageError, match="pages of '128' positions, and"):
        engine.load_prefix(saved)


def damaged(path: Path, change: Callable[[bytearray], Any]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    target = path.with_name("damaged.safetensors")
    target.write_bytes(content)
    return target


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, str]], Any]) -> Path:
    """The file with other tensors or other metadata, as whoever wrote it with the library."""
    tensors, target = load_file(path), path.with_name("rewritten.safetensors")
    with safe_open(path, "np") as file:
        header = file.metadata()
    change(tensors, header)
    save_file(tensors, target, header)
    return target


def test_a_damaged_file_is_told_in_one_line(folder: Path, saved: Path) -> None:
    size = saved.stat().st_size
    changes: list[Callable[[bytearray], Any]] = [
        lambda content: content.clear(),
        lambda content: content.__delitem__(slice(size - 1, None)),
        lambda content: content.__delitem__(slice(40, None)),
        lambda content: content.__setitem__(0, content[0] ^ 255),
        lambda content: content.__setitem__(size // 2, content[size // 2] ^ 1),
        lambda content: content.__setitem__(size - 1, content[size - 1] ^ 128),
    ]
    with Engine(folder, backend="numpy") as engine:
        for change in changes:
            with pytest.raises(UsageError, match=r"damaged\.safetensors is (truncated, damaged|damaged: its content)"):
                engine.load_prefix(damaged(saved, change))
        assert engine.load().cached_pages == 0


def test_a_file_that_is_none_of_save_prefix_is_refused(folder: Path, saved: Path, tmp_path: Path) -> None:
    def grown(tensors: dict[str, Any], header: dict[str, str]) -> None:
        tensors["keys"] = np.concatenate([tensors["keys"]] * 2)
        words = zlib.crc32(header["notes"].encode())
        for name in sorted(tensors):
            words = zlib.crc32(tensors[name].tobytes(), zlib.crc32(name.encode(), words))
        header["checksum"] = f"{words:08x}"

    text = tmp_path / "text.safetensors"
    text.write_text("no tensors", encoding="utf-8")
    cases = [
        (folder / "model.safetensors", "is no stored prefix: expected a file that save_prefix of this version has"),
        (rewritten(saved, lambda _, header: header.update({"minillm.prefix": "9"})), "a prefix in the version '9'"),
    ]
    with Engine(folder, backend="numpy") as engine:
        for path, reason in cases:
            with pytest.raises(UsageError, match=reason):
                engine.load_prefix(path)
        with pytest.raises(UsageError, match="is damaged"):
            engine.load_prefix(rewritten(saved, lambda _, header: header.update(notes='{"a": "b"}')))
        with pytest.raises(UsageError, match="is damaged"):
            engine.load_prefix(rewritten(saved, grown))
        with pytest.raises(UsageError, match=r"text\.safetensors is truncated, damaged or no stored prefix"):
            engine.load_prefix(text)
        with pytest.raises(UsageError, match="cannot be read: No such file"):
            engine.load_prefix(tmp_path / "none.safetensors")
        with pytest.raises(UsageError, match="cannot be read: Is a directory"):
            engine.load_prefix(tmp_path)
        with pytest.raises(ParameterError, match="path should be the path of a file, found 3"):
            engine.load_prefix(3)  # type: ignore[arg-type]


def test_a_full_cache_is_told_with_what_is_free(folder: Path, saved: Path) -> None:
    page = 2 * 2 * 32 * 128 * 4
    with Engine(folder, backend="numpy", cache_bytes=2 * page) as engine:
        with pytest.raises(CacheFullError, match="takes 3 pages of the K/V cache, of which 2 are free"):
            engine.load_prefix(saved)
        assert engine.load().free_pages == 2
        assert engine.generate(LINE[:20], max_new_tokens=2).token_ids
        with pytest.raises(CacheFullError):
            engine.save_prefix(saved.with_name("no.safetensors"), LINE)
    assert not saved.with_name("no.safetensors").exists()


def test_what_cannot_be_written_is_told_before_it_is_computed(folder: Path, tmp_path: Path) -> None:
    with Engine(folder, backend="numpy") as engine:
        with pytest.raises(UsageError, match="cannot be written: No such file"):
            engine.save_prefix(tmp_path / "none" / "a.safetensors", LINE)
        assert engine.stats.prefill_tokens == 0


def test_engines_without_a_prefix_cache_refuse_by_name(folder: Path, saved: Path, tmp_path: Path) -> None:
    dynamic = tmp_path / "dynamic"
    raw = test_llama.CONFIG | {"vocab_size": 512, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    task_models.write_weights(dynamic, raw)
    (dynamic / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    bert = task_models.write_task_model(tmp_path / "bert", task_models.BERT)
    cases: list[tuple[Callable[[], Engine], type[MinillmError], str]] = [
        (lambda: Engine(folder, prefix_cache=False), ParameterError, "which this engine has not: make"),
        (lambda: Engine(dynamic), ParameterError, "has not: keys depend on the text's length"),
        (lambda: Engine(seq2seq.write_checkpoint(tmp_path / "t5")), ParameterError, "with an encoder-decoder keys and"),
        (lambda: Engine(bert), TaskError, "needs a model that generates text"),
    ]
    for make, kind, reason in cases:
        with make() as engine:
            with pytest.raises(kind, match=f"save_prefix.* {reason}|save_prefix: {reason}"):
                engine.save_prefix(tmp_path / "a.safetensors", [5, 6])
            with pytest.raises(kind, match=f"load_prefix.* {reason}|load_prefix: {reason}"):
                engine.load_prefix(saved)


def test_what_hooks_have_changed_is_not_saved(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with Engine(folder, backend="numpy") as engine:
        with (
            engine.hooks({"blocks.0.mlp.out": lambda array, place: array * 0}),
            pytest.raises(ParameterError, match="save_prefix: hooks change what the model computes"),
        ):
            engine.save_prefix(path, LINE)
        assert engine.save_prefix(path, LINE).tokens == 300


# --- asyncio ----------------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_an_async_engine_saves_and_loads_beside_its_requests(folder: Path, saved: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with running(Engine(folder, backend="numpy")) as aio:
            prefix, answer, written = await asyncio.gather(
                aio.load_prefix(saved),
                aio.generate([50, 51], max_new_tokens=30, eos_token_id=[]),
                aio.save_prefix(tmp_path / "b.safetensors", LINE[40:], notes={"a": "b"}),
            )
            assert (prefix.tokens, written.tokens, len(answer.token_ids)) == (300, 260, 30)
            result = await aio.generate([*LINE, 7], max_new_tokens=2)
            assert result.completions[0].token_ids and aio.engine.stats.cached_tokens >= 300
            with pytest.raises(UsageError, match="cannot be read"):
                await aio.load_prefix(tmp_path / "none")

    asyncio.run(main())
