# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What is run rather than imported: measurements, the demo and the doctor. One file per subject."""
