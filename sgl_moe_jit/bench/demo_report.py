# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's result as text for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_moe_jit.bench.demo import MAX_LOGIT_DIFF, DemoResult, versions
from sgl_moe_jit.bench.demo_model import NEW_TOKENS, NUM_PROMPTS, PROMPT_BYTES


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned, indented lines; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _model_part(result: DemoResult) -> list[str]:
    rows = [
        [
            "seed",
            "tokens that agree",
            "max logit diff",
            "logit std",
            "closest top-1/top-2",
            "shared left out",
        ]
    ]
    rows += [
        [
            str(seed.seed),
            f"{seed.tokens_equal} of {seed.tokens}",
            f"{seed.max_logit_diff:.1e}",
            f"{seed.logit_std:.2f}",
            f"{seed.smallest_margin:.1e}",
            f"{seed.dropped_shared_diff:.1e}",
        ]
        for seed in result.seeds
    ]
    right = result.tokens_agree and result.max_logit_diff <= MAX_LOGIT_DIFF
    verdict = "equal tokens, logits within the limit" if right else "NOT EQUAL"
    return [
        "1. A small DeepSeek-V3 model, float32: transformers' own blocks against the fused ones",
        f"   (random weights; stock experts: {result.stock}; {NUM_PROMPTS} prompts of "
        f"{PROMPT_BYTES} bytes, {NEW_TOKENS} new tokens each, greedy)",
        *table(rows),
        f"  -> {verdict}: max logit diff {result.max_logit_diff:.1e}, "
        f"allowed {MAX_LOGIT_DIFF:.0e}; 'shared left out' is what a missing add would show",
    ]


def _layer_part(result: DemoResult) -> list[str]:
    layers = result.bfloat16
    rows = [["layer", "rms error", "99.9 % below", "largest error"]]
    sizes = {"stock": [x.stock for x in layers], "fused": [x.fused for x in layers]}
    for name, errors in sizes.items():
        rms = (sum(e.rms**2 for e in errors) / len(errors)) ** 0.5
        p999, largest = max(e.p999 for e in errors), max(e.largest for e in errors)
        rows.append([name, f"{rms:.3e}", f"{p999:.3e}", f"{largest:.3e}"])
    pairs = list(zip(sizes["fused"], sizes["stock"], strict=True))
    counts = [
        sum(ours.rms <= stock.rms for ours, stock in pairs),
        sum(ours.p999 <= stock.p999 for ours, stock in pairs),
        sum(ours.largest <= stock.largest for ours, stock in pairs),
    ]
    rows.append(["fused no larger", *(f"{count} of {len(layers)} layers" for count in counts)])
    output_rms = sum(x.output_rms for x in layers) / len(layers)
    return [
        "2. The MoE layers of the same models in bfloat16, against float64 "
        f"(outputs have rms {output_rms:.2f})",
        *table(rows),
    ]


def _finalize_part(result: DemoResult) -> list[str]:
    rows = [
        [
            "tokens",
            "fused us (p20-p80)",
            "separate us (p20-p80)",
            "speed-up",
            "fused must move",
            "finalize + add",
        ]
    ]
    rows += [
        [
            str(case.num_tokens),
            f"{case.fused_us:.1f} ({case.fused_p20_us:.1f}-{case.fused_p80_us:.1f})",
            f"{case.separate_us:.1f} ({case.separate_p20_us:.1f}-{case.separate_p80_us:.1f})",
            f"{case.separate_us / case.fused_us:.1f}x",
            _bytes(case.bytes),
            _bytes(case.separate_bytes),
        ]
        for case in result.finalize
    ]
    right = all(case.within_tolerance for case in result.finalize)
    busy = any(
        case.fused_p80_us > 2 * case.fused_p20_us or case.separate_p80_us > 2 * case.separate_p20_us
        for case in result.finalize
    )
    note = "  -> the times scatter by more than 2x: other work runs here; try again when idle"
    return [
        "3. Finalize and shared add at DeepSeek-V3 width: hidden 7168, top 8, bfloat16 rows, "
        "float32 weights",
        "   (separate: `(gemm2[idx].float() * w[..., None]).sum(1)`, cast, `+ shared`)",
        *table(rows),
        "  -> fused values are within the rounding bound of float64"
        if right
        else "  -> fused values are WRONG: outside the rounding bound of float64",
        *([note] if busy else []),
    ]


def _jit_part(result: DemoResult) -> list[str]:
    jit = result.jit
    if jit.cold_seconds is None or jit.warm_milliseconds is None:
        lines = [f"  not measured: {jit.error}", "  see: python -m sgl_moe_jit doctor"]
    else:
        lines = table(
            [
                ["first call of a process", "time"],
                ["empty cache: compile, load, run", f"{jit.cold_seconds:.2f} s"],
                ["filled cache: load, run", f"{jit.warm_milliseconds:.1f} ms"],
            ]
        )
    return ["4. The finalize kernel, compiled on first use (imports not counted)", *lines]


def render(result: DemoResult) -> str:
    """Return the whole report."""
    head = "sgl_moe_jit demo on " + result.device
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    parts = (_model_part, _layer_part, _finalize_part, _jit_part)
    return "\n".join([head, names, *(line for part in parts for line in ("", *part(result)))])
