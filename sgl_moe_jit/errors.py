# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Exceptions whose message carries the remedy.

A caller's mistake is a ``TypeError`` (dtype) or a ``ValueError`` (shape, range, device). The
classes here are for what the machine lacks or the compiler refuses.
"""

from __future__ import annotations


class SglMoeJitError(RuntimeError):
    """Base of this library's own errors."""


class ToolchainError(SglMoeJitError):
    """A compiler or one of its parts is missing; the message lists the places searched."""


class DependencyError(SglMoeJitError):
    """A header dependency is missing; the message lists the places searched and the pip command."""


class BuildError(SglMoeJitError):
    """The compiler or linker failed; the message starts with its first error line."""


class LoadError(SglMoeJitError):
    """A freshly built module does not load."""


class UnsupportedError(SglMoeJitError):
    """A path was asked for by name and cannot serve the request; the message says why."""
