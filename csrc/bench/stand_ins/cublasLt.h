// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// Empty: flashinfer's headers include it and the code built here uses nothing of it, so that a
// peer can be built on a machine without the library's development files.
#pragma once
