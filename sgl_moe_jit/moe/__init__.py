# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer's parts: how routing travels, deferral, and the runners."""
