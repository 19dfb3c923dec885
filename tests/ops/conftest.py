# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What several of the ops' GPU tests need."""

from pathlib import Path

import pytest

from sgl_moe_jit.jit import load_jit


@pytest.fixture(scope="session")
def pdl():
    """A predecessor that writes late, and a consumer, for tests of dependent launches."""
    return load_jit(
        "pdl_test",
        cuda_files=[Path(__file__).with_name("pdl_producer.cuh")],
        cuda_wrappers=[
            ("produce_late", "pdl_test::produce_late"),
            ("consume", "pdl_test::consume"),
        ],
    )
