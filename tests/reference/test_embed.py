"""Table look-up."""

import numpy as np

from minillm.reference.embed import cost, embed


def test_each_id_gets_its_row() -> None:
    table = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
    ids = np.array([3, 9, 3, 0])
    out = np.empty((4, 4), np.float32)
    assert embed(table, ids, np, out) is out
    np.testing.assert_array_equal(out, np.stack([table[i] for i in ids]))


def test_cost_is_the_bytes_of_the_arrays() -> None:
    ids, rows = np.zeros(5, np.int64), np.zeros((5, 4), np.float32)
    assert cost(5, 4, row_bytes=16) == (0, ids.nbytes + rows.nbytes, rows.nbytes, 0)
    assert cost(5, 4, row_bytes=8) == (0, ids.nbytes + rows.nbytes // 2, rows.nbytes, 0)
