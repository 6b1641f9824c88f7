"""minillm analyze as its users run it."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from minillm.cli.analyze import analyze
from minillm.cli.main import run
from minillm.cli.output import bytes_text, number_text, seconds_text
from minillm.cli.plots import draw_roofline, marks_of
from minillm.errors import install
from minillm.measure.accounting import hardware
from minillm.measure.accounting.hardware import Hardware

from ..shapes import BASE

needs_matplotlib = pytest.mark.skipif(not find_spec("matplotlib"), reason="drawing needs the plot extra")


def analyzed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["analyze", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.longer
def test_a_short_model_is_asked_for_as_much_as_it_has_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"max_position_embeddings": 64}), encoding="utf-8")
    found = analyzed(capsys, str(tmp_path))
    assert (found["prompt_length"], found["context"]) == (63, 64)
    assert analyzed(capsys, "opt-125m")["prompt_length"] == 512


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("opt-125m", 125_239_296),
        pytest.param("opt-1.3b", 1_315_758_080, marks=pytest.mark.slow),
        pytest.param("opt-13b", 12_853_473_280, marks=pytest.mark.slow),
        ("opt-175b", 174_604_468_224),
    ],
)
def test_json_of_published_names(model: str, parameters: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyzed(capsys, model)
    assert found["parameters"] == parameters == sum(found["parameters_by_part"].values())
    assert found["weights_bytes"] == found["weights_bytes_by_dtype"]["float16"]
    assert 2 * parameters < found["weights_bytes"] < 2.01 * parameters  # vectors are float32
    assert found["weights_bytes_by_dtype"]["float32"] == 4 * parameters
    for phase in (found["prefill"], found["decode"]):
        assert {"name", "layer", "flops", "bytes_read", "bytes_written", "intensity", "bound"} <= phase["ops"][0].keys()
        assert phase["flops"] == sum(op["flops"] for op in phase["ops"])
        assert phase["bytes"] == sum(op["bytes_read"] + op["bytes_written"] for op in phase["ops"])
        assert {op["bound"] for op in phase["ops"]} <= {"compute", "memory"}
        layers = [op["layer"] for op in phase["ops"] if op["name"] == "attend"]
        assert layers == list(range(len(layers)))


@pytest.mark.longer
def test_cache_of_opt_13b(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyzed(capsys, "opt-13b", "--dtype", "float16")["kv_cache_bytes_per_token"] == 819_200
    assert analyzed(capsys, "opt-13b", "--cache-dtype", "int8")["kv_cache_bytes_per_token"] == 2 * 40 * 40 * (128 + 4)


def test_a_folder_needs_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    found = analyzed(capsys, str(tmp_path), "--prompt-length", "5", "--context", "9", "--batch", "3")
    assert found["storage"]["weights"] == found["storage"]["cache"] == "bfloat16"
    assert found["kv_cache_bytes"] == 3 * 9 * found["kv_cache_bytes_per_token"]
    (embedding,) = [op for op in found["decode"]["ops"] if op["name"] == "embedding.tokens"]
    assert embedding["layer"] is None and embedding["flops"] == 3 * 24


def test_a_quantised_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = {"quant_method": "minillm", "bits": 4, "group_size": 64}
    raw = BASE | {"quantization_config": quantization, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    found = analyzed(capsys, str(tmp_path), "--prompt-length", "5")
    assert (found["storage"]["weights"], found["storage"]["group"]) == ("int4", 64)
    assert run(["analyze", str(tmp_path), "--dtype", "int8"]) == 2
    assert "already quantised to int4" in capsys.readouterr().err


@pytest.mark.longer
def test_tables_show_every_part_and_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", "opt-350m", "--tensor-parallel", "4", "--pipeline-parallel", "2"]) == 0
    out = capsys.readouterr().out
    found = analyzed(capsys, "opt-350m", "--tensor-parallel", "4", "--pipeline-parallel", "2")
    for name in {op["name"] for op in found["prefill"]["ops"]} | found["parameters_by_part"].keys():
        assert f"\n{name} " in out
    assert "331,196,416" in out
    assert "tensor parallelism over 4: 49 all-reduces" in out and "pipeline parallelism over 2" in out
    assert found["prefill"]["all_reduces"] == 49 and found["prefill"]["all_reduce_bytes"] == 2 * 512 * 1024
    assert found["decode"]["stage_sends"] == 1 and found["decode"]["stage_bytes"] == 2 * 1024
    sent = 2 * 3 / 4 * found["prefill"]["all_reduce_total_bytes"]  # by each rank of a ring of four
    assert found["prefill"]["all_reduce_seconds"] == pytest.approx(sent / 300e9)
    assert found["decode"]["stage_seconds"] == pytest.approx(2 * 1024 / 300e9)
    assert out.count("by NVLink 3, 300 GB/s each way, at best prefill ") == 2
    assert f"each of 8 devices has about {found['weights_bytes'] / 8e6:.2f} MB of weights" in out


@pytest.mark.longer
def test_a_model_too_large_for_the_hardware_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", "bloom", "--hardware", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "80.00 GB cannot hold one sequence of 513 tokens: the weights alone take 352.5 GB" in printed


def test_conventions(capsys: pytest.CaptureFixture[str]) -> None:
    plain = analyzed(capsys, "opt-125m")["prefill"]["flops"]
    square = analyzed(capsys, "opt-125m", "--full-square")["prefill"]["flops"]
    products = analyzed(capsys, "opt-125m", "--products-only")["prefill"]["flops"]
    macs = analyzed(capsys, "opt-125m", "--products-only", "--macs")["prefill"]["flops"]
    assert square - plain == 12 * 12 * (4 * 64 + 4) * (512 * 511 // 2)  # L H (4 D + 4) hidden pairs
    assert products < plain and macs * 2 == products


def test_this_machine_computes_in_float32(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probed = Hardware(name="mine", rates={"float32": 1e11}, bandwidth=4e10, memory=10**10, source="a test")
    monkeypatch.setattr(hardware, "probe", lambda: probed)
    found = analyzed(capsys, "opt-125m", "--hardware", "this", "--dtype", "int8")
    assert found["storage"]["activations"] == found["storage"]["cache"] == "float32"
    assert found["hardware"]["bandwidth"] == 4e10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["opt-13bb"], 2, "model 'opt-13bb' is neither a folder nor a hub id (owner/name); did you mean opt-13b?"),
        (["xyz"], 2, "model 'xyz' is neither a folder nor a hub id (owner/name); published names: opt-125m, "),
        (["opt-13b", "--hardware", "tpu"], 2, "expected one of a100, h100, h200, rtx4090, l4, this"),
        (["opt-13b", "--dtype", "fp8"], 2, "dtype 'fp8' is not known: expected one of float32, "),
        (["opt-13b", "--cache-dtype", "int2"], 2, "cache_dtype 'int2' is not known"),
        (["opt-13b", "--batch", "0"], 2, "batch should be at least 1"),
        (["opt-13b", "--context", "5000"], 2, "context 5000 is beyond the model's 2048 positions"),
        (["opt-13b", "--tensor-parallel", "3"], 2, "tensor_parallel 3 should divide the model's num_heads 40"),
        (["opt-13b", "--revision", "x"], 2, "revision 'x' has no effect"),
        (["./nowhere"], 1, "there is no folder './nowhere'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size 24 should be a multiple of num_attention_heads 5"),
        ({"ffn_dim": 0}, "ffn_dim should be at least 1"),
        ({"model_type": "rnn"}, "model_type is 'rnn'; minillm runs 'opt'"),
    ],
)
def test_impossible_shapes_name_the_field(
    fields: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | fields), encoding="utf-8")
    assert run(["analyze", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err


def test_numbers_as_text() -> None:
    assert [number_text(n) for n in (0, 999, 1000, 13e12, 819_200)] == ["0", "999", "1.000 k", "13.00 T", "819.2 k"]
    assert [bytes_text(n) for n in (0, 80e9)] == ["0 B", "80.00 GB"]
    assert [seconds_text(s) for s in (2.5, 0.0428, 3e-6, 4e-9)] == ["2.5 s", "42.8 ms", "3 us", "4 ns"]


@pytest.mark.longer
def test_experts_are_read_as_far_as_they_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    """One token reads k experts; four read 8 (1 - (3/4)^4) = 5.47 of Mixtral's eight, if they choose at random."""
    alone, four = analyzed(capsys, "mixtral-8x7b"), analyzed(capsys, "mixtral-8x7b", "--batch", "4")
    assert (alone["parameters"], alone["active_parameters"]) == (46_702_792_704, 12_879_925_248)
    one = 2 * 4096 * 14336 * 2  # bytes of an expert's gate and up

    def read(found: dict[str, Any], rows: int) -> float:
        (first, *_) = [op for op in found["decode"]["ops"] if op["name"] == "mlp.gate_up"]
        return float((first["bytes_read"] - rows * 4096 * 2) / one)

    assert read(alone, 2) == 2
    assert read(four, 8) == pytest.approx(5.46875)
    assert run(["analyze", "mixtral-8x7b", "--batch", "4"]) == 0
    assert (
        "2 of 8 experts, 12.88 G of 46.70 G parameters; experts read in each layer, if tokens choose at random: "
        in (printed := capsys.readouterr().out)
    )
    assert "prefill 8, decode 5.469 (at most 8)" in printed


def texts(svg: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]


@needs_matplotlib
@pytest.mark.slow
def test_the_page_has_every_operation_and_needs_nothing_from_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(["analyze", "opt-350m", "--batch", "8", "--html", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    found = analyzed(capsys, "opt-350m", "--batch", "8")
    assert not re.search(r'(?:src|href)="(?!#)|url\((?!#)|<script|@import|{{|{%', html)
    root = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    drawn = "\n".join(texts(root))
    for phase in ("prefill", "decode"):
        seconds = found[phase]["seconds"]
        for name in {op["name"] for op in found[phase]["ops"] if op["flops"]}:
            share = sum(op["seconds"] for op in found[phase]["ops"] if op["name"] == name) / seconds
            assert f"{name}\u00a0{share:.1%}" in drawn
    rows = re.findall("<tr>(.*?)</tr>", html)
    shown = ["".join(f"{cell}  " for cell in re.findall("<t[dh]>(.*?)</t[dh]>", row)).split() for row in rows]
    assert shown == [line.split() for line in printed.splitlines() if "  " in line], "the tables are those printed"


@needs_matplotlib
@pytest.mark.slow
def test_the_name_of_a_model_is_text_and_not_markup(tmp_path: Path) -> None:
    folder = tmp_path / "<b>&$x^2$"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    assert run(["analyze", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;$x^2$ on A100" in html and "<b>&" not in html
    assert run(["analyze", str(folder), "--png", str(tmp_path / "page.svg")]) == 0
    assert any("<b>&$x^2$ on A100" in text for text in texts(ElementTree.parse(tmp_path / "page.svg").getroot()))


@needs_matplotlib
def test_marks_stand_on_the_roof() -> None:
    """Read from the drawing: positions of the marks, and their areas, against the analysis."""
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    analysis, figure = analyze("opt-13b", batch=4, hardware="h100"), Figure()
    draw_roofline(figure, analysis)
    (axis,) = figure.axes
    circles = [one for one in axis.collections if isinstance(one, PathCollection)]
    for phase in (analysis.prefill, analysis.decode):
        groups = marks_of(phase)
        drawn, circles = circles[: len(groups)], circles[len(groups) :]
        points = {tuple(one.get_offsets()[0]): one.get_sizes()[0] for one in drawn}
        assert len(points) == len(groups)
        assert sum(one.seconds for group in groups for one in group) == pytest.approx(phase.seconds, rel=0.05)
        for (intensity, rate), area in points.items():
            assert rate == min(989.5e12, intensity * 3.35e12)
            (group,) = [group for group in groups if intensity in [one.intensity for one in group]]
            assert all(intensity / 1.25 < one.intensity < intensity * 1.25 for one in group)
            assert area == pytest.approx(30 + 270 * sum(one.seconds for one in group) / phase.seconds)


@pytest.mark.slow
@needs_matplotlib
def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyze", "opt-125m", "--png", str(tmp_path / "roof.png")]) == 0
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    assert run(["analyze", "opt-125m", "--png", str(tmp_path / "none" / "roof.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--png", "--html"])
def test_without_matplotlib_it_is_said(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["analyze", "opt-125m", option, str(tmp_path / "roof")]) == 2
    assert install("plot") in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert run(["analyze", "opt-125m"]) == 0


@pytest.mark.longer
def test_the_state_of_a_sequence_is_shown_where_a_model_keeps_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert analyzed(capsys, "lfm2-1.2b")["state_bytes_per_sequence"] == 10 * 2 * 2048 * 4
    assert analyzed(capsys, "opt-125m")["state_bytes_per_sequence"] == 0
