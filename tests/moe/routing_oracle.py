# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routing one token and one expert at a time in Python floats (float64)."""

import math

import torch

from sgl_moe_jit.moe.router_config import RouterConfig

NAN = float("nan")
INF = float("inf")


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def scores_of(logits, function):
    if function == "softmax":
        top = max(logits)
        terms = [math.exp(x - top) for x in logits]
        return [t / math.fsum(terms) for t in terms]
    if function == "sigmoid":
        return [sigmoid(x) for x in logits]
    return [math.sqrt(math.log1p(math.exp(x)) if x < 30 else x) for x in logits]


def best(values, k, among=None):
    """The k largest, equal ones by lower place; NaN last."""
    places = range(len(values)) if among is None else among
    return sorted(places, key=lambda i: (math.isnan(values[i]), -values[i], i))[:k]


def group_score(values, rule):
    values = sorted(values, reverse=True)
    return values[0] if rule == "max" else math.fsum(values[:2])


def route_row(logits, config: RouterConfig, bias=None, scale=None):
    """Return ids (best first) and weights of one token; finite logits."""
    if config.score_after_top_k:
        ids = best(logits, config.top_k)
        weights = scores_of([logits[i] for i in ids], config.score_function)
    else:
        scores = scores_of(logits, config.score_function)
        choice = [s + (bias[i] if bias else 0.0) for i, s in enumerate(scores)]
        size = config.num_experts // config.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(config.n_group)]
        open_groups = best([group_score(g, config.group_rule) for g in groups], config.topk_group)
        among = [e for e in range(config.num_experts) if e // size in open_groups]
        ids = best(choice, config.top_k, among)
        weights = [scores[i] for i in ids]
    if config.renormalize:
        total = math.fsum(weights)
        if config.epsilon_kind == "clamp":
            total = max(total, config.renormalize_epsilon)
        else:
            total += config.renormalize_epsilon
        weights = [w / total if total else 0.0 for w in weights]
    factor = config.routed_scaling_factor if config.scale_in_weights else 1.0
    return ids, [
        w * factor * (scale[i] if scale else 1.0) for i, w in zip(ids, weights, strict=True)
    ]


def route(logits, config, bias=None, scale=None):
    """Return ids [T, K] int64 and weights [T, K] float64."""
    rows = [
        route_row(
            row,
            config,
            None if bias is None else bias.tolist(),
            None if scale is None else scale.tolist(),
        )
        for row in logits.double().tolist()
    ]
    shape = (len(rows), config.top_k)
    ids = torch.tensor([ids for ids, _ in rows]).reshape(shape)
    return ids, torch.tensor([w for _, w in rows], dtype=torch.float64).reshape(shape)


def spread_logits(num_tokens, num_experts, seed=0, step=0.05):
    """Random rows whose values keep a distance, so that rounding decides no choice."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)
    return (rows - num_experts / 2) * step


def weight_tolerance(config):
    """Relative: a few roundings of the score, E of a softmax's sum, K + 2 of the steps after."""
    terms = config.num_experts if config.score_function == "softmax" else 0
    return (8 + terms + config.top_k + 2) * 2.0**-24


def assert_routed(output, ids, weights, config):
    """The same ids in the same order, and weights to rounding."""
    assert torch.equal(output.topk_ids.cpu().long(), ids)
    got = output.topk_weights.cpu().double()
    error = (got - weights).abs()
    allowed = weight_tolerance(config) * weights.abs()
    worst = int((error - allowed).argmax()) if error.numel() else 0
    assert bool((error <= allowed).all()), (
        f"{int((error > allowed).sum())} of {error.numel()} weights; flat element {worst}: got "
        f"{got.flatten()[worst]}, expected {weights.flatten()[worst]}"
    )
