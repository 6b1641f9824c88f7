"""MPI's communicators are freed, and a server asks for the thread support that it needs."""

import pytest

from .processes import ended, output, started, under_mpi

pytest.importorskip("mpi4py")
pytestmark = under_mpi

FREED = """
from minillm import Engine
from minillm.distributed.ranks import joined
from minillm.parallel import Parallel

parallel = Parallel(tensor=2)
with Engine(parallel=parallel, backend="numpy") as engine:
    ranks, tokens = engine.ranks, None if engine.rank else engine.generate("A", max_new_tokens=3).token_ids
assert not ranks.world._comm and not ranks.group._comm
for _ in range(2100):  # more than an MPI library has
    joined(parallel, None).close()
if engine.rank == 0:
    print(len(tokens))
"""


def test_a_closed_engine_has_freed_its_communicators() -> None:
    assert output(2, code=FREED) == "3\n"


SERVE = """
import sys
import mpi4py

mpi4py.rc.thread_level = "{level}"
from minillm.cli.main import run

sys.exit(run(["serve", "--port", "0", "--tensor-parallel", "2", *{models}]))
"""


@pytest.mark.parametrize(
    ("level", "models", "needed"), [("serialized", "one two", "MULTIPLE"), ("funneled", "", "SERIALIZED")]
)
def test_a_server_refuses_an_mpi_with_too_little_thread_support(level: str, models: str, needed: str) -> None:
    words = [word for name in models.split() for word in ("--model", f"{name}=nowhere")]
    code, err = ended(started(2, code=SERVE.format(level=level, models=words)))
    [line] = [line for line in err.splitlines() if line.startswith("minillm: ")]
    assert code != 0 and f"MPI_THREAD_{needed}, and gives MPI_THREAD_{level.upper()}: use an MPI library" in line
