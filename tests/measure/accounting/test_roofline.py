"""Bounds, floors and capacities, against arithmetic by hand and against trial."""

import pytest

from minillm.errors import ParameterError
from minillm.measure.accounting import Conventions, Storage, memory
from minillm.measure.accounting.hardware import CHIPS, Hardware, find_hardware, product_rate, read_bandwidth
from minillm.measure.accounting.roofline import Analysis, Workload
from minillm.measure.accounting.storage import storage_for
from minillm.models import published_config
from minillm.parallel import Parallel

HALF = Storage(weights="float16", cache="float16", activations="float16")


def analysis(
    model: str = "opt-13b",
    *,
    hardware: Hardware = CHIPS["a100"],
    storage: Storage = HALF,
    conventions: Conventions = Conventions(),  # noqa: B008
    tensor: int = 1,
    pipeline: int = 1,
    **work: int,
) -> Analysis:
    return Analysis(
        config=published_config(model),
        storage=storage,
        workload=Workload(**work),
        hardware=hardware,
        conventions=conventions,
        parallel=Parallel(tensor=tensor, pipeline=pipeline),
    )


def test_prefill_is_bound_by_computing_and_decode_by_memory() -> None:
    """The lecture's two phases; in decode one multiply-add for each weight of two bytes: 1 FLOP/byte."""
    found = analysis()
    products = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
    assert {row.name for row in found.prefill.rows if found.prefill.bound(row) == "compute"} == products
    assert {found.decode.bound(row) for row in found.decode.rows} == {"memory"}
    assert found.decode.flops / found.decode.bytes == pytest.approx(1, rel=0.01)


def test_floors_by_hand() -> None:
    """MLP up of one layer, 512 rows: 2 x 512 x 5120 x 20480 FLOPs, and bias and ReLU; the decode step reads it all."""
    found = analysis()
    row = next(row for row in found.prefill.rows if row.name == "mlp.up")
    assert found.prefill.row_seconds(row) == pytest.approx((2 * 512 * 5120 * 20480 + 2 * 512 * 20480) / 312e12)
    row = next(row for row in found.decode.rows if row.name == "mlp.up")
    moved = 2 * 5120 * 20480 + 4 * 20480 + 2 * (5120 + 20480)
    assert found.decode.row_seconds(row) == pytest.approx(moved / 2.039e12)
    assert found.decode.seconds == pytest.approx(found.decode.bytes / 2.039e12)  # since memory bounds every operation


def test_large_batches_move_decode_to_the_other_side_of_the_ridge() -> None:
    found = analysis(batch=1024, prompt_length=16)
    bounds = {row.name: found.decode.bound(row) for row in found.decode.rows}
    assert bounds["mlp.up"] == "compute" and bounds["attend"] == "memory"


def test_what_fits_is_the_last_that_does() -> None:
    found = analysis(context=1000)
    size = CHIPS["a100"].memory
    assert memory.needed(found.config, HALF, found.largest_batch, 1000) <= size
    assert memory.needed(found.config, HALF, found.largest_batch + 1, 1000) > size
    assert memory.needed(found.config, HALF, 1, found.largest_context) <= size
    assert memory.needed(found.config, HALF, 1, found.largest_context + 1) > size
    assert analysis("opt-175b").largest_batch == 0
    assert analysis("opt-175b", tensor=8).largest_batch > 0


def test_messages_are_the_lectures() -> None:
    """2 L D bytes of L tokens in 16 bits, 2 D of one."""
    found = analysis(tensor=8, pipeline=2, prompt_length=100)
    assert found.prefill.message_bytes == 2 * 100 * 5120
    assert found.decode.message_bytes == 2 * 5120
    alone = analysis(prompt_length=100)
    assert found.prefill.seconds == pytest.approx(alone.prefill.seconds / 8)  # stages take turns


def test_conventions_change_counts_and_not_what_hardware_does() -> None:
    plain, macs = analysis(), analysis(conventions=Conventions(multiply_add=1, products_only=True))
    products = analysis(conventions=Conventions(products_only=True))
    assert macs.prefill.flops * 2 == products.prefill.flops < plain.prefill.flops
    assert macs.prefill.seconds == pytest.approx(products.prefill.seconds)
    assert analysis(conventions=Conventions(full_square=True)).decode.flops == plain.decode.flops


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 0}, "batch should be at least 1, found 0"),
        ({"prompt_length": -1}, "prompt_length should be at least 1"),
        ({"prompt_length": 2048}, "context 2049 is beyond the model's 2048 positions"),
        ({"tensor": 7}, "tensor_parallel 7 should divide the model's num_heads 40"),
        ({"pipeline": 41}, "pipeline_parallel 41 is more than the model's num_layers 40"),
    ],
)
def test_impossible_sizes_are_named(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        analysis(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "checkpoint", "on_cpu", "expected"),
    [
        ("auto", "bfloat16", False, ("bfloat16", "bfloat16", "bfloat16")),
        ("auto", "float32", False, ("float32", "float32", "float32")),
        ("int4", "float16", False, ("int4", "float16", "float16")),
        ("int8", "float32", False, ("int8", "float16", "float16")),
        ("float16", "float32", True, ("float16", "float32", "float32")),
    ],
)
def test_what_is_usual_beside_the_weights(
    weights: str, checkpoint: str, on_cpu: bool, expected: tuple[str, str, str]
) -> None:
    storage = storage_for(weights, checkpoint=checkpoint, on_cpu=on_cpu)
    assert (storage.weights, storage.cache, storage.activations) == expected


def test_hardware_by_name() -> None:
    assert find_hardware("h200").bandwidth == 4.8e12
    with pytest.raises(ParameterError, match=r"hardware 'tpu' is not known: expected one of a100, .*, this"):
        find_hardware("tpu")
    with pytest.raises(ParameterError, match="no rate for int8"):
        CHIPS["l4"].rate("int8")


def test_the_probe_measures_something_plausible() -> None:
    """Slower than 10 MB/s or 10 MFLOP/s, or faster than any chip above, would be a mistake of units."""
    assert 1e7 < read_bandwidth(2, size=8 << 20) < 1e13
    assert 1e7 < product_rate(128) < 1e14
