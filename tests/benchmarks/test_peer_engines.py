"""Engines in processes and out of them, on small random weights: they run, and they run the same model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillm import Engine
from minillm.models import opt

from .conftest import SMALL, SMALL_FAMILIES


@pytest.fixture
def report() -> Any:
    import peer_report

    return peer_report


@pytest.fixture
def folder(small: str, tmp_path: Path) -> Path:
    from peer_files import write_checkpoint

    write_checkpoint(small, tmp_path)
    return tmp_path


@pytest.mark.longer
def test_a_worker_answers(report: Any, folder: Path, subprocess_environment: dict[str, str]) -> None:
    from peer_process import Worker

    with Worker(report.find("minillm-numpy", "int8"), str(folder), 1, subprocess_environment) as worker:
        task = report.Task("", 2, 5, 4)._asdict()
        assert worker.ask(do="time", limit=60, vocab_size=96, **task)["tokens"] == 2 * 3  # the first come of prompts
        file = str(folder / "logits.npy")
        assert worker.ask(do="logits", length=7, file=file, vocab_size=96) == {"file": file}
        assert np.load(file).shape == (7, 96)
        peak = worker.ask(do="memory")["peak_bytes"]
        assert peak is None or peak > 10_000_000


@pytest.mark.parametrize("line", ["Loading weights: 100%\n", "3\n"])
def test_a_reply_that_is_none(line: str) -> None:
    from harness import BenchmarkError
    from peer_process import parse_reply

    with pytest.raises(BenchmarkError, match="which is no JSON object"):
        parse_reply(line)


@pytest.mark.longer
def test_minillm_as_a_peer(folder: Path) -> None:
    """Any order of batch sizes, a prompt of several steps, a limit; and each task leaves the engine idle."""
    from harness import token_ids
    from peer_engines import make

    peer = make("minillm-numpy", "float32", str(folder), 1)
    for size in (1, 3, 1):
        assert peer.decode([token_ids(i, 5, 96) for i in range(size)], 4, 60).tokens == 3 * size
        assert peer.decode([token_ids(i, 5, 96) for i in range(size)], 4, 0).tokens == size
        assert not peer._engine.busy
    assert peer.prefill(token_ids(0, 9, 96)) > 0


@pytest.mark.reference
def test_the_engines_run_the_same_weights(folder: Path) -> None:
    """minillm, transformers and CTranslate2 give the same logits, and as many tokens as are asked for."""
    pytest.importorskip("transformers", reason="needs the peers extra")
    pytest.importorskip("ctranslate2", reason="needs the peers extra")
    from harness import token_ids
    from peer_engines import make
    from peer_files import write_ctranslate2

    write_ctranslate2(folder)
    expected = make("minillm-numpy", "float32", str(folder), 1).logits(token_ids(0, 9, 96))
    for engine in ("transformers", "ctranslate2"):
        peer = make(engine, "float32", str(folder), 1)
        assert np.abs(peer.logits(token_ids(0, 9, 96)) - expected).max() < 1e-5 * np.abs(expected).max()
        assert peer.decode([token_ids(i, 5, 96) for i in range(3)], 4, 60).tokens == 9
        assert peer.prefill(token_ids(0, 9, 96)) > 0


@pytest.fixture
def gguf_folder(small: str, tmp_path: Path) -> Path:
    """The small shape in all formats of llama.cpp."""
    pytest.importorskip("llama_cpp", reason="needs the peers extra")
    pytest.importorskip("gguf", reason="needs the peers extra")
    from peer_files import LLAMA_TYPES, write_llama_cpp

    write_llama_cpp(small, tmp_path, list(LLAMA_TYPES))
    return tmp_path


@pytest.mark.reference
def test_llama_cpp_reads_what_is_written(gguf_folder: Path) -> None:
    """Every format loads; errors grow as bits shrink; a batch decodes; and bytes are counted as minillm counts them."""
    from harness import token_ids
    from peer_engines import make
    from peer_files import gguf_bytes
    from peer_plans import weight_bytes
    from peer_report import find

    exact = make("llama.cpp", "f32", str(gguf_folder), 1).logits(token_ids(0, 9, 96))
    assert exact.shape == (9, 96)
    errors = []
    for form in ("f16", "bf16", "Q8_0", "Q4_0"):
        peer = make("llama.cpp", form, str(gguf_folder), 1)
        errors.append(float(np.abs(peer.logits(token_ids(0, 9, 96)) - exact).max() / np.abs(exact).max()))
        assert peer.decode([token_ids(i, 5, 96) for i in range(3)], 4, 60).tokens == 9
        assert peer.prefill(token_ids(0, 9, 96)) > 0
    assert 0 < errors[0] < errors[1] < errors[3] < 0.5
    assert 0 < errors[2] < errors[3]
    config = opt.read_config(SMALL)
    for label, form in (("f32", "float32"), ("f16", "float16"), ("Q8_0", "int8")):
        counted = weight_bytes(find("minillm-cpu", form), config, {})
        assert gguf_bytes(gguf_folder / f"{label}.gguf") == counted


@pytest.mark.reference
@pytest.mark.parametrize("engine", ["ik_llama.cpp", "ik_llama.cpp-rtr"])
def test_llama_cpps_fork_computes_the_same_file(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sequences, too, without its flash attention; and token by token what it says of all at once."""
    pytest.importorskip("ik_llama_cpp", reason="needs the peers extra")
    from harness import token_ids
    from peer_engines import make
    from peer_files import write_llama_cpp

    from minillm.models import published

    shape = SMALL_FAMILIES["llama"] | {"num_attention_heads": 1, "num_key_value_heads": 1}  # it has no heads of 16
    monkeypatch.setitem(published(), "small", shape)
    write_llama_cpp("small", tmp_path, ["f32", "Q8_0"])
    ids = token_ids(0, 9, 96)
    with Engine(tmp_path / "Q8_0.gguf", backend="numpy") as ours:
        expected = ours.forward(ids)
    peer = make(engine, "Q8_0", str(tmp_path), 1)
    logits = peer.logits(ids)
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
    assert peer.decode([token_ids(i, 5, 96) for i in range(3)], 4, 60).tokens == 9
    assert peer.prefill(ids) > 0
    assert next(peer.tokens(ids, 1)) == logits[-1].argmax()  # type: ignore[attr-defined]


@pytest.mark.reference
def test_llama_cpp_computes_gpt2_on_our_weights(small: str, gguf_folder: Path) -> None:
    """The logits of transformers' GPT-2 with the same matrices, but for llama.cpp's float16 cache and GELU's table."""
    torch = pytest.importorskip("torch", reason="needs the reference extra")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    from harness import token_ids
    from peer_engines import make
    from peer_files import tensors_of

    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4, n_inner=128, bos_token_id=2, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tensors = tensors_of(small)
    state = {
        "wte.weight": tensors["embed_tokens.weight"].load(),
        "wpe.weight": tensors["embed_positions.weight"].load()[2:],
    }
    for kind in ("weight", "bias"):
        state[f"ln_f.{kind}"] = tensors[f"final_layer_norm.{kind}"].load()
        for i in range(2):
            ours, theirs = f"layers.{i}", f"h.{i}"
            qkv = [tensors[f"{ours}.self_attn.{name}_proj.{kind}"].load() for name in "qkv"]
            state[f"{theirs}.attn.c_attn.{kind}"] = np.concatenate(qkv).T
            for mine, name in (("self_attn.out_proj", "attn.c_proj"), ("fc1", "mlp.c_fc"), ("fc2", "mlp.c_proj")):
                state[f"{theirs}.{name}.{kind}"] = tensors[f"{ours}.{mine}.{kind}"].load().T
            for mine, name in (("self_attn_layer_norm", "ln_1"), ("final_layer_norm", "ln_2")):
                state[f"{theirs}.{name}.{kind}"] = tensors[f"{ours}.{mine}.{kind}"].load()
    missing, extra = model.transformer.load_state_dict({n: torch.tensor(t) for n, t in state.items()}, strict=False)
    assert not extra
    assert not missing
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids(0, 20, 96)])).logits[0].numpy()
    logits = make("llama.cpp", "f32", str(gguf_folder), 1).logits(token_ids(0, 20, 96))
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()
