# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Doors into other libraries; each submodule imports its own only when it is itself imported."""
