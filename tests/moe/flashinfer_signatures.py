# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Signatures of FlashInfer's functions, read from its Python files without importing them.

``python -m tests.moe.flashinfer_signatures WHEEL...`` writes flashinfer_signatures.json for wheels
that ``pip download --no-deps flashinfer-python==VERSION`` brought.
"""

import ast
import functools
import inspect
import json
import sys
import zipfile
from importlib import metadata
from pathlib import Path

FIXTURE = Path(__file__).with_suffix(".json")
FILES = {
    "flashinfer/fused_moe/core.py": (
        "trtllm_bf16_moe",
        "trtllm_bf16_routed_moe",
        "trtllm_fp4_block_scale_moe",
        "trtllm_fp4_block_scale_routed_moe",
        "trtllm_fp8_block_scale_moe",
        "trtllm_fp8_block_scale_routed_moe",
        "cutlass_fused_moe",
    ),
    "flashinfer/quantization/fp4_quantization.py": ("fp4_quantize",),
    "flashinfer/quantization/fp8_quantization.py": ("mxfp8_quantize",),
}


def parameters_of(text: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return each function's parameter list as source text, without annotations."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            for part in ast.walk(node.args):
                if isinstance(part, ast.arg):
                    part.annotation = None
            found[node.name] = ast.unparse(node.args)
    return found


def default_of(expression: ast.expr | None) -> object:
    """Return a default: a constant's value, or the text of an expression."""
    if expression is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(expression)
    except ValueError:
        return ast.unparse(expression)


def signature(parameters: str) -> inspect.Signature:
    """Turn a parameter list into a signature."""
    arguments = ast.parse(f"def f({parameters}): ...").body[0].args
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [(a, d, kinds.POSITIONAL_OR_KEYWORD) for a, d in zip(plain, defaults, strict=True)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    pairs += [(a, d, kinds.KEYWORD_ONLY) for a, d in named]
    return inspect.Signature([kinds(a.arg, kind, default=default_of(d)) for a, d, kind in pairs])


def installed() -> tuple[str, dict[str, inspect.Signature]] | None:
    """Return version and signatures of the installed wheel; None where there is none."""
    try:
        package = metadata.distribution("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None
    found = {}
    for file, names in FILES.items():
        text = Path(package.locate_file(file)).read_text(encoding="utf-8")
        found |= parameters_of(text, names)
    return package.version, {name: signature(text) for name, text in found.items()}


def recorded() -> dict[str, dict[str, inspect.Signature]]:
    """Return the signatures in the fixture by version."""
    table = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return {
        version: {name: signature(text) for name, text in functions.items()}
        for version, functions in table.items()
    }


@functools.cache
def every_version() -> dict[str, dict[str, inspect.Signature]]:
    """Return the recorded signatures, and the installed ones where there are any."""
    here = installed()
    return recorded() | ({here[0]: here[1]} if here else {})


def main(wheels: list[str]) -> None:
    table = {}
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            found = {}
            for file, names in FILES.items():
                found |= parameters_of(archive.read(file).decode(), names)
        table[Path(wheel).name.split("-")[1]] = found
    FIXTURE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
