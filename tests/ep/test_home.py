# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``HomeExpander``: the layout's numbering, and every shared expert on its token's rank."""

import pytest
import torch

from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from tests.ep.ep_cases import choose, home_expand


@pytest.mark.parametrize(
    "layout", [EpLayout(6, 2, 4), EpLayout(9, ep_size=3, num_shared=2)], ids=str
)
def test_ids_are_the_layouts(layout):
    ids, weights = choose(3, 6, layout.num_physical, 3, absent=0.3)
    ids[4:] = -1
    for rank in range(layout.ep_size):
        got = HomeExpander(layout, rank)(ids, weights, 0.4)
        want = home_expand(layout, rank)(ids, weights, 0.4)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_rank_or_a_slot_that_is_not_there():
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < ep_size, 2, got 2"):
        HomeExpander(EpLayout(4, ep_size=2), 2)
    with pytest.raises(ValueError, match="layout: expected num_shared of at least 1, got 0"):
        HomeExpander(EpLayout(4, num_shared=0), 0)
