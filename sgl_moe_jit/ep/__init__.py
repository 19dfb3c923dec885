# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: shared experts as expert slots of each rank."""

from sgl_moe_jit.ep.layout import EpLayout

__all__ = ["EpLayout"]
