"""The families that llama.cpp and CTranslate2 know: every engine computes the same model, in float32 to rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from minillm.backends.loader import Loader
from minillm.backends.numpy import NumpyBackend
from minillm.backends.weights import Weight
from minillm.errors import ParameterError
from minillm.models import family_named, published, random_model

from .. import families
from .conftest import SMALL, SMALL_FAMILIES, SMALL_KIN

TOKENS = 30


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], str]:
    """Publishes a configuration, and gives its name."""

    def publish(raw: dict[str, Any]) -> str:
        monkeypatch.setitem(published(), "small", raw)
        return "small"

    return publish


@pytest.fixture
def exact_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's attention in float32: by default its cache, and what it fuses, is float16."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the peers extra")
    pytest.importorskip("gguf", reason="needs the peers extra")
    default = llama_cpp.llama_context_default_params

    def exact() -> Any:
        params = default()
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params

    monkeypatch.setattr(llama_cpp, "llama_context_default_params", exact)


def logits_of(engine: str, folder: Path) -> NDArray[np.float32]:
    from harness import token_ids
    from peer_engines import make

    form = "f32" if engine == "llama.cpp" else "float32"
    return make(engine, form, str(folder), 1).logits(token_ids(0, TOKENS, 96))


def distance(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


@pytest.mark.reference
@pytest.mark.parametrize("name", SMALL_FAMILIES)
def test_every_engine_computes_the_same_model(
    name: str, shape: Callable[[dict[str, Any]], str], exact_llama_cpp: None, tmp_path: Path
) -> None:
    """The order of rows in Q and K, biases, heads tied or not, epsilon, bases: what is wrong shows in the logits."""
    pytest.importorskip("transformers", reason="needs the peers extra")
    pytest.importorskip("ctranslate2", reason="needs the peers extra")
    from peer_files import write_checkpoint, write_ctranslate2, write_llama_cpp

    small = shape(SMALL_FAMILIES[name])
    write_checkpoint(small, tmp_path)
    write_ctranslate2(tmp_path)
    write_llama_cpp(small, tmp_path, ["f32"])
    expected = logits_of("minillm-numpy", tmp_path)
    for engine in ("transformers", "ctranslate2", "llama.cpp"):
        by_a_table = name == "gpt2" and engine == "llama.cpp"  # GELU, of float16
        assert distance(logits_of(engine, tmp_path), expected) < (1e-3 if by_a_table else 2e-6), engine


@pytest.mark.reference
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "gpt_oss"])
def test_other_families_have_the_file_that_minillm_writes(
    family: str, shape: Callable[[dict[str, Any]], str], exact_llama_cpp: None, tmp_path: Path
) -> None:
    """The first layers of a shape as well."""
    from peer_files import raw_config, write_checkpoint, write_llama_cpp

    raw = next(iter(families.CONFIGS[family].values())) | {"rms_norm_eps": 1e-6}
    raw |= {"linear_value_head_dim": raw.get("linear_key_head_dim"), "rope_parameters": {"rope_type": "default"}}
    part = f"{shape(raw)}:2"
    assert raw_config(part)["num_hidden_layers"] == 2
    assert len(raw_config(part).get("layer_types", "ab")) == 2
    write_checkpoint(part, tmp_path)
    write_llama_cpp(part, tmp_path, ["f32"])
    assert distance(logits_of("llama.cpp", tmp_path), logits_of("minillm-numpy", tmp_path)) < 1e-3


@pytest.mark.reference
def test_experts_in_mxfp4_are_in_one_file_for_both_engines(
    shape: Callable[[dict[str, Any]], str],
    exact_llama_cpp: None,
    tmp_path: Path,
    subprocess_environment: dict[str, str],
) -> None:
    """Two of four experts compute a token, and its bytes are theirs."""
    from harness import token_ids
    from peer_engines import make
    from peer_files import write_checkpoint, write_llama_cpp
    from peer_plans import weight_bytes
    from peer_process import Worker
    from peer_report import find

    raw = families.CONFIGS["gpt_oss"]["two of four"] | {"hidden_size": 64, "intermediate_size": 32}
    small = shape(raw | {"rope_parameters": {"rope_type": "default"}})
    write_checkpoint(small, tmp_path)
    counted = write_llama_cpp(small, tmp_path, ["MXFP4"])
    assert {path.name for path in tmp_path.glob("*.gguf")} == {"MXFP4.gguf"}
    ours, theirs = find("minillm-cpu", "mxfp4"), find("llama.cpp", "mxfp4")
    config = family_named("gpt_oss").read_config(raw)
    assert weight_bytes(ours, config, counted) == weight_bytes(theirs, config, counted) == counted["MXFP4"]
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(tmp_path / "MXFP4.gguf").tensors}
    halves = sum(size for name, size in tensors.items() if "_exps." in name) // 2
    assert counted["MXFP4"] == sum(tensors.values()) - tensors["token_embd.weight"] - halves
    expected = make("llama.cpp", "MXFP4", str(tmp_path), 1).logits(token_ids(0, TOKENS, 96))
    with Worker(find("minillm-numpy", "mxfp4"), str(tmp_path), 1, subprocess_environment, cpu_time=True) as worker:
        reply = worker.ask(do="logits", length=TOKENS, vocab_size=96, file=str(tmp_path / "logits.npy"))
        timed = worker.ask(do="time", batch=1, prompt=5, new_tokens=4, limit=60, vocab_size=96)
    assert distance(np.load(reply["file"]), expected) < 0.05  # llama.cpp rounds activations to 8 bits
    assert (timed["tokens"], timed["seconds"] > 0) == (3, True)


@pytest.mark.parametrize("layers", ["0", "3", "x", "-1"])
def test_a_number_of_layers_that_a_shape_does_not_have_is_refused(layers: str, small: str) -> None:
    from peer_files import raw_config

    with pytest.raises(ParameterError, match=f"small:{layers}: expected 1 to 2 layers of small"):
        raw_config(f"{small}:{layers}")


@pytest.mark.reference
def test_frequencies_that_are_scaled(
    shape: Callable[[dict[str, Any]], str], exact_llama_cpp: None, tmp_path: Path
) -> None:
    """Llama 3's scaling, made for so short a text that some pairs stay, some are divided and one is between."""
    from peer_files import write_checkpoint, write_llama_cpp

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    small = shape(SMALL_KIN | {"rope_scaling": scaling, "max_position_embeddings": 512})
    write_checkpoint(small, tmp_path)
    write_llama_cpp(small, tmp_path, ["f32"])
    assert distance(logits_of("llama.cpp", tmp_path), logits_of("minillm-numpy", tmp_path)) < 2e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["opt", *SMALL_FAMILIES])
def test_weights_are_counted_as_they_are_kept(
    name: str, shape: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that a token needs are the sum of what the model really holds, but for tables that it looks up."""
    from peer_plans import PLANS, USUAL, unread_bytes, weight_bytes

    raw = SMALL if name == "opt" else SMALL_FAMILIES[name]
    small, family = shape(raw), family_named(raw["model_type"])
    tables = {"embed_positions", "wpe"} | ({"embed_tokens"} if name == "llama" else set())
    for plan in (plan for plan in PLANS if plan.engine == "minillm-numpy" and plan.form in USUAL):
        held: list[Weight] = []
        prepare = Loader.prepare

        def note(self: Any, *args: Any, held: list[Weight] = held, prepare: Any = prepare) -> Weight:
            held.append(prepare(self, *args))
            return held[-1]

        with monkeypatch.context() as patch:
            patch.setattr(Loader, "prepare", note)
            random_model(small, 0, 0.02, NumpyBackend(weights=plan.form))
        config = family.read_config(raw)
        assert weight_bytes(plan, config, {}) == sum(w.nbytes for w in held if w.name not in tables), plan
        assert unread_bytes(plan, config) == sum(w.nbytes for w in held if w.name in tables), plan


@pytest.mark.reference
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2"])
def test_bytes_of_llama_cpps_files(name: str, shape: Callable[[dict[str, Any]], str], tmp_path: Path) -> None:
    """They are counted as minillm's are."""
    pytest.importorskip("llama_cpp", reason="needs the peers extra")
    pytest.importorskip("gguf", reason="needs the peers extra")
    from peer_files import write_llama_cpp
    from peer_plans import weight_bytes
    from peer_report import find

    raw = SMALL_FAMILIES[name]
    counted = write_llama_cpp(shape(raw), tmp_path, ["f32", "f16", "Q8_0"])
    config = family_named(raw["model_type"]).read_config(raw)
    for label, form in (("f32", "float32"), ("f16", "float16"), ("Q8_0", "int8")):
        assert counted[label] == weight_bytes(find("minillm-cpu", form), config, {})
