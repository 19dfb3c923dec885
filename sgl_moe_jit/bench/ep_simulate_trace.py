# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The routing trace of the demo's model, for the simulator.

``python -m sgl_moe_jit.bench.ep_simulate_trace benchmarks/traces/demo.npz`` writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sgl_moe_jit.bench.demo_model import build_model, moe_layers, prompts
from sgl_moe_jit.ep.trace import RoutingTrace, record_routing
from sgl_moe_jit.integrations.transformers import load_block

NEW_TOKENS = 160


@torch.no_grad()
def record_demo(path: Path, seed: int = 1, new_tokens: int = NEW_TOKENS) -> RoutingTrace:
    """Generate text with the demo's model, and write which experts its tokens chose.

    Args:
        path: The file.
        seed: Of the weights, which are random: the trace shows a real router's correlations from
            token to token, not a trained model's balance.
        new_tokens: To generate for each of the demo's prompts.
    """
    model = build_model(seed, torch.device("cpu"))
    for name, block in list(moe_layers(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, load_block(block))
    ids = prompts()
    with record_routing(model, model_name=f"demo model, seed {seed}") as recorder:
        model.generate(
            ids,
            max_new_tokens=new_tokens,
            do_sample=False,
            attention_mask=ids.new_ones(ids.shape),
        )
    trace = recorder.trace()
    trace.save(path)
    return trace


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m sgl_moe_jit.bench.ep_simulate_trace FILE.npz")
    written = record_demo(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {written.model}, {len(written.calls)} calls")
