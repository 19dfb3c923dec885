# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A kernel's mangled name as its function and named template arguments."""

from __future__ import annotations

import ctypes
import functools
import re

from sgl_moe_jit.jit import paths

_SHORT = {
    "__nv_bfloat16": "bf16",
    "bfloat16_t": "bf16",
    "__half": "f16",
    "half_t": "f16",
    "float": "f32",
}


def demangle(symbol: str) -> str:
    """Return a symbol as C++ writes it. The C++ runtime does it: torch has loaded it anyway."""
    function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    found = function(symbol.encode(), None, None, ctypes.byref(status))
    if status.value != 0:
        return symbol
    text = ctypes.string_at(found).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(found)
    return text


def template_parameters(text: str) -> dict[str, list[str]]:
    """Return the parameters' names of each kernel template and struct template of a source."""
    found = re.findall(
        r"template\s*<([^<>]*)>\s*(?:struct|class|__global__\s+void\s+(?:__launch_bounds__\([^;{]*?\))?)"
        r"\s*(\w+)\s*[({:]",
        text,
    )
    return {
        name: [
            re.search(r"(\w+)\s*(?:=.*)?$", item.strip(), re.DOTALL).group(1)
            for item in parameters.split(",")
        ]
        for parameters, name in found
    }


@functools.cache
def shipped_parameters() -> dict[str, list[str]]:
    """Return the same of all our sources."""
    found = {}
    for folder in (paths.include_dir(), paths.csrc_dir()):
        for path in sorted(folder.rglob("*.cu*")):
            found.update(template_parameters(path.read_text(encoding="utf-8")))
    return found


def parse_name(demangled: str, parameters: dict[str, list[str]]) -> tuple[str, dict[str, str]]:
    """Return a kernel's name and its template arguments by name (``argN`` where unknown)."""
    text = re.sub(r"\(anonymous namespace\)::", "", demangled).removeprefix("void ")
    text = re.sub(r"\b\w+::", "", text).replace(" >", ">")
    name, arguments = _split(text[: _matching_parenthesis(text)])
    return name, _named(name, arguments, parameters)


def _matching_parenthesis(text: str) -> int:
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[i], 0)
        if text[i] == "(" and depth == 0:
            return i
    return len(text)


def _split(text: str) -> tuple[str, list[str]]:
    """Return ``name<a, b<c>>`` as its name and arguments."""
    name, bracket, rest = text.partition("<")
    if not bracket:
        return text, []
    arguments, depth = [""], 0
    for letter in rest[:-1]:
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += letter
    return name, [argument.strip() for argument in arguments]


def _named(name: str, values: list[str], parameters: dict[str, list[str]]) -> dict[str, str]:
    names = parameters.get(name, [])
    found: dict[str, str] = {}
    for i, value in enumerate(values):
        inner, inner_values = _split(value)
        if inner_values and inner in parameters:
            found.update(_named(inner, inner_values, parameters))
        else:
            found[names[i] if i < len(names) else f"arg{i}"] = _SHORT.get(value, value)
    return found
