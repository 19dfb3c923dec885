# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The C++ names of the dtypes that modules are compiled for."""

from __future__ import annotations

import torch

# (C++ type, member of host::DType)
CPP_TYPES = {
    torch.bfloat16: ("__nv_bfloat16", "kBFloat16"),
    torch.float16: ("__half", "kFloat16"),
    torch.float32: ("float", "kFloat32"),
}
