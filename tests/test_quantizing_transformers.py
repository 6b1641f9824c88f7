"""transformers reads the checkpoints that we write in 16 bits, and says the same."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the reference extra")
transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from minillm.backends.numpy import NumpyBackend  # noqa: E402
from minillm.models import load_model  # noqa: E402
from minillm.quantizing import write_checkpoint  # noqa: E402

from . import reference  # noqa: E402
from .tiny import logits_of, runner_of  # noqa: E402

pytestmark = pytest.mark.reference

LINE = [3, 4, 5, 6, 7, 3, 90]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["pre-norm", "post-norm", "untied", "galactica"])
def test_the_same_logits(tmp_path: Path, variant: str, dtype: str) -> None:
    source = reference.save(reference.build(variant, 3), tmp_path / "source")
    write_checkpoint(source, tmp_path / "out", dtype)
    theirs, report = transformers.OPTForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours = logits_of(runner_of(load_model(tmp_path / "out", NumpyBackend(weights="auto"))), LINE)
    np.testing.assert_allclose(ours, reference.logits(theirs.eval(), LINE), atol=1e-4)
    plain = logits_of(runner_of(load_model(source, NumpyBackend())), LINE)
    assert np.abs(ours - plain).max() > 1e-4, "the weights are rounded"
