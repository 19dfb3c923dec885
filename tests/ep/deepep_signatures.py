# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Signatures of ``deep_ep.Buffer``, read from a wheel's Python files without importing them.

``python -m tests.ep.deepep_signatures WHEEL...`` writes deepep_signatures.json for wheels that
``pip download --no-deps --only-binary :all: sgl-deep-ep==VERSION`` brought.
"""

import ast
import inspect
import json
import sys
import zipfile
from pathlib import Path

FIXTURE = Path(__file__).with_suffix(".json")
METHODS = (
    "__init__",
    "get_dispatch_layout",
    "dispatch",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
)


def signatures_in(text):
    """Return {method: [[name, kind, default as source or None], ...]} of class Buffer, or None."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Buffer":
            found = {
                item.name: parameters(item.args)
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name in METHODS
            }
            assert sorted(found) == sorted(METHODS), found.keys()
            return found
    return None


def parameters(arguments):
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [(a, d, "POSITIONAL_OR_KEYWORD") for a, d in zip(plain, defaults, strict=True)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    pairs += [(a, d, "KEYWORD_ONLY") for a, d in named]
    return [[a.arg, kind, None if d is None else ast.unparse(d)] for a, d, kind in pairs]


def to_signature(rows):
    def default(text):
        return inspect.Parameter.empty if text is None else ast.literal_eval(text)

    return inspect.Signature(
        [
            inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default(text))
            for name, kind, text in rows
        ]
    )


def recorded():
    """Return {version: {method: Signature}}."""
    table = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return {
        version: {name: to_signature(rows) for name, rows in methods.items()}
        for version, methods in table.items()
    }


def main(wheels):
    table = {}
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            texts = (archive.read(n).decode() for n in archive.namelist() if n.endswith(".py"))
            found = [methods for methods in map(signatures_in, texts) if methods]
        assert len(found) == 1, wheel
        name, version = Path(wheel).name.split("-")[:2]
        table[f"{name.replace('_', '-')} {version}"] = found[0]
    # One method a line.
    parts = (
        f" {json.dumps(version)}: {{\n"
        + ",\n".join(f"  {json.dumps(m)}: {json.dumps(rows)}" for m, rows in methods.items())
        + "\n }"
        for version, methods in table.items()
    )
    FIXTURE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
