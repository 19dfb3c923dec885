# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Layers on random weights, and what the layer and block tests watch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.prepared_layer import PreparedMoE
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKFormat

E, H, WIDTH, K = 6, 32, 16, 3


class Mlp(torch.nn.Module):
    """Shared experts: SwiGLU of width ``width``."""

    def __init__(self, hidden=H, width=WIDTH, out=None, **kwargs):
        super().__init__()
        self.gate_proj = torch.nn.Linear(hidden, width, bias=False, **kwargs)
        self.up_proj = torch.nn.Linear(hidden, width, bias=False, **kwargs)
        self.down_proj = torch.nn.Linear(width, out or hidden, bias=False, **kwargs)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TopKGate(torch.nn.Module):
    """A softmax router: [T, H] to a ``StandardTopKOutput``."""

    def __init__(self, hidden=H, experts=E, top_k=K, factor=1.0, **kwargs):
        super().__init__()
        self.proj = torch.nn.Linear(hidden, experts, bias=False, **kwargs)
        self.top_k, self.factor = top_k, factor

    def forward(self, x):
        weights, ids = self.proj(x).float().softmax(-1).topk(self.top_k)
        return StandardTopKOutput(weights, ids, self.factor)


def make_layer(*, hidden=H, width=WIDTH, experts=E, dtype=torch.float32, device="cpu", **options):
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        x = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return torch.nn.Parameter(x.to(device, dtype))

    return FusedMoE.from_w13_w2(
        random(experts, 2 * width, hidden), random(experts, hidden, width), **options
    )


class FakeRunner:
    """Rows are ``(id + 1) * x``; keeps a log, and a workspace as large as wanted while it runs.

    Args:
        log: Collects "routed".
        says: Its ``mutates_input``.
        does: Whether it overwrites its input.
        defers: Its ``can_defer``.
        workspace: Called to make what it holds while it runs.
    """

    name = "fake"

    def __init__(self, log, *, says=False, does=False, defers=True, workspace=None):
        self.log, self.mutates_input, self.does, self.defers = log, says, does, defers
        self.workspace = workspace
        self.seen = []  # of each call: (topk_output, defer)

    def can_defer(self, topk_format):
        return self.defers and topk_format is not TopKFormat.PACKED

    def run(self, hidden_states, topk_output, *, defer=None):
        self.log.append("routed")
        self.seen.append((topk_output, defer))
        held = None if self.workspace is None else self.workspace()
        ids = topk_output.topk_ids
        num_tokens, top_k = ids.shape
        rows = (hidden_states[:, None] * (ids[..., None] + 1)).flatten(0, 1)
        if self.does:
            hidden_states.mul_(2.0)
        index = torch.arange(num_tokens * top_k, dtype=torch.int32, device=ids.device)
        output = DeferredFinalizeOutput(
            rows,
            topk_output.topk_weights,
            torch.where(ids.flatten() < 0, -1, index).view(ids.shape),
            top_k,
            topk_output.routed_scaling_factor,
        )
        del held
        return output if defer and self.can_defer(topk_output.format) else output.finalize()


def fake_config(dtype=torch.float32, device="cpu", experts=E):
    return RunnerConfig(experts, H, WIDTH, dtype, torch.device(device), False, True)


class Logged(torch.nn.Module):
    """A module that writes to a log when it is called, and may look at something first."""

    def __init__(self, inner, log, name, look=lambda: None):
        super().__init__()
        self.inner, self.log, self.name, self.look = inner, log, name, look

    def forward(self, x):
        self.log.append(self.name)
        self.look()
        return self.inner(x)


def logged_block(runner, *, look=lambda: None, gate=None, **options):
    """A block around a fake runner, all of whose parts write to the runner's log."""
    torch.manual_seed(3)
    log = runner.log
    logits = torch.nn.Linear(H, E, bias=False)

    def topk(output):
        log.append("topk")
        weights, ids = output.softmax(-1).topk(K)
        return StandardTopKOutput(weights, ids)

    return SharedExpertMoEBlock(
        Logged(logits, log, "gate"),
        PreparedMoE(runner, fake_config()),
        Logged(Mlp(), log, "shared", look),
        gate,
        read_gate=topk,
        **options,
    )


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside that are alive, now and at most.

    What an operation allocates and frees by itself is not seen.
    """

    def __enter__(self):
        self._alive, self.peak = {}, 0
        return super().__enter__()

    @property
    def now(self):
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.multiprocessing.reductions import StorageWeakRef

        kwargs = kwargs or {}
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out
