# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer's parts: routing, deferral, the experts and their runners, and the block.

``input_checks`` what a caller hands in · ``topk`` how routing travels · ``router_config``,
``topk_selection``, ``routing``, ``router`` how it is chosen · ``deferred`` the request and the
un-finalized rows · ``activation_kinds``, ``quantization``, ``expert_weights``, ``runner_config``
what a runner has to serve · ``runners``, ``bound_runner`` who serves it · ``expert_parameters``,
``expert_slice``, ``shared_slots``, ``layer_base``, ``layer``, ``prepared_layer`` a layer of experts
· ``block`` and ``block_*`` the whole of it, with ``shared_order``, ``streams`` and, over ranks,
``dispatch`` · ``config`` and ``hf_*`` a model's layer as its configuration says · ``flashinfer_*``
weights as FlashInfer reads them · ``loaders`` modules of other libraries.
"""
