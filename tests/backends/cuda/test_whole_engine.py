"""`Engine` and the command line on the emulated GPU: the demo model's tokens, and what a user is told."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.backends.cuda.backend import CudaBackend
from minillm.backends.placement import Placement
from minillm.cli.main import run
from minillm.errors import MinillmError

from .recording import RecordingDevice

PROMPTS = ["A list of colors: red,", "One two", "The"]


@pytest.fixture
def on_device(device: RecordingDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes engines on the emulated GPU, which record their decode steps."""

    def choose(placement: Placement, max_batch_size: int) -> CudaBackend:
        assert placement.device == "cuda"
        return CudaBackend(device, device.recorder, placement.dtype, max_batch_size=max_batch_size)

    def engine(dtype: str = "float32") -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("minillm.engine.assembly.choose_backend", choose)
            return Engine(device="cuda", dtype=dtype, max_batch_size=4)

    yield engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "fields"),
    [
        (PROMPTS[:1], {}),
        (PROMPTS[:1], {"do_sample": True, "seed": 3}),
        (PROMPTS, {}),
        (PROMPTS, {"do_sample": True, "seed": 3, "top_p": 0.9}),
        (PROMPTS[:1], {"num_beams": 3}),
    ],
    ids=["greedy", "sampled", "ragged", "ragged and sampled", "beams"],
)
def test_the_demo_model(prompts: list[str], fields: dict[str, Any], on_device: Callable[..., Engine]) -> None:
    texts = []
    for make in (on_device, lambda: Engine(backend="numpy", dtype="float32", max_batch_size=4)):
        with make() as engine:
            texts.append([each.text for each in engine.generate(prompts, max_new_tokens=4, **fields)])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-16), ("bfloat16", 2.0**-8)])
def test_what_is_watched_and_changed_inside_is_as_on_a_cpu(
    dtype: str, unit: float, on_device: Callable[..., Engine]
) -> None:
    def less(array: Any, place: Any) -> Any:
        return 0.5 * array

    def nothing(array: Any, place: Any) -> Any:
        return np.zeros(array.shape, np.float32)  # of the host, and of another type

    texts, watched = [], []
    changes = {"blocks.1.attention.*": less, "blocks.*.mlp.*": less, "blocks.0.residual*": less}
    requests: list[dict[str, Any]] = [
        {},
        {"hooks": changes},
        {"dola_layers": "high", "hooks": {"blocks.2.residual": nothing}},
    ]
    for make in (partial(on_device, dtype), lambda: Engine(backend="numpy", dtype="float32", max_batch_size=4)):
        with make() as engine:
            answers = [engine.generate(PROMPTS[1], max_new_tokens=2, watch=["**"], **fields) for fields in requests]
            texts.append([answer.text for answer in answers])
            watched.append([answer.watched for answer in answers])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    for ours, expected in zip(*watched, strict=True):
        for name, rows in expected.items():
            np.testing.assert_allclose(ours[name], rows, rtol=0, atol=8 * unit * abs(rows).max(), err_msg=name)


@pytest.mark.slow
def test_a_prefix_goes_to_a_file_and_into_the_memory_of_the_device(
    on_device: Callable[..., Engine], tmp_path: Path
) -> None:
    path, texts = tmp_path / "prefix.safetensors", []
    with on_device() as engine:
        saved = engine.save_prefix(path, PROMPTS[0])
        texts.append(engine.generate(PROMPTS[0] + " orange", max_new_tokens=3).text)
    with on_device() as engine:
        assert engine.load_prefix(path) == saved
        texts.append(engine.generate(PROMPTS[0] + " orange", max_new_tokens=3).text)
        assert engine.stats.cached_tokens == saved.tokens
    with Engine() as engine, pytest.raises(MinillmError, match="was computed with backend 'cuda', and this engine has"):
        engine.load_prefix(path)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("A list", {"num_beams": 5}),
        ([5] * 5000, {}),
        ([5, 10**6], {}),
    ],
    ids=["too many beams", "context full", "no such token"],
)
def test_a_mistake_is_told_as_on_a_cpu(prompt: Any, fields: dict[str, Any], on_device: Callable[..., Engine]) -> None:
    said = []
    for make in (on_device, lambda: Engine(max_batch_size=4)):
        with make() as engine:
            with pytest.raises(MinillmError) as error:
                engine.generate(prompt, max_new_tokens=2, **fields)
            said.append((type(error.value), str(error.value)))
            assert not engine.busy
    assert said[0] == said[1]


@pytest.mark.longer
def test_the_command_line_says_in_one_line_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    cupy = pytest.importorskip("cupy", reason="without CuPy another line is said")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run(["generate", "--prompt", "A list", "--device", "cuda"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert "device 'cuda' needs an NVIDIA GPU" in err
