# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Each way to install: the sources are found and a kernel builds from an empty cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

import sgl_moe_jit.ops  # noqa: F401 - registers the shipped kernels
from sgl_moe_jit.jit import CudaArch, families

ROOT = Path(__file__).resolve().parents[1]

# Not find_spec: looking for pip makes setuptools give up its distutils, which torch.compile needs.
INSTALLED = {distribution.metadata["Name"] for distribution in distributions()}

pytestmark = [
    pytest.mark.field_report("J40"),
    *(
        pytest.mark.skipif(name not in INSTALLED, reason=f"needs the package {name}")
        for name in ("hatchling", "editables", "pip")
    ),
]

USE = """
import json, sys
import torch
import sgl_moe_jit
from sgl_moe_jit.jit import paths
x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
idx = torch.tensor([[1, 0], [-1, 1]], dtype=torch.int32)
w = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
y = sgl_moe_jit.moe_finalize_fuse_shared(x, idx, w, torch.ones(2, 4), 2)
where = [sgl_moe_jit.__file__, str(paths.csrc_dir()), str(paths.include_dir())]
print(json.dumps([*where, y.tolist()]))
"""
# w[0] = (0.5, 2) on rows 1, 0; w[1] = (skipped, 3) on row 1; plus one.
EXPECTED = [[3.0, 5.5, 8.0, 10.5], [13.0, 16.0, 19.0, 22.0]]


def run(argv: list[str], **options) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def hatch(project: Path, target: str, out: Path) -> Path:
    """Build one target without the network; return the file."""
    out.mkdir()
    run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)], cwd=project)
    (built,) = (path for path in out.iterdir() if path.suffix in {".whl", ".gz"})
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the project, so that building leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("checkout") / "project"
    skip = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=skip)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return hatch(checkout, "wheel", tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def unpacked_sdist(checkout, tmp_path_factory) -> Path:
    sdist = hatch(checkout, "sdist", tmp_path_factory.mktemp("sdist") / "dist")
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (project,) = folder.iterdir()
    return project


def use_installed(wheel: Path, folder: Path):
    """Install into a fresh environment, compute there, return what it says."""
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)])
    # Only now: pip must not see, and try to replace, a copy in the test environment.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "test-environment.pth").write_text("\n".join(sorted(shared)) + "\n")
    (folder / "elsewhere").mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env["SGL_MOE_JIT_CACHE_DIR"] = str(folder / "cache")
    answer = run([str(python), "-c", USE], cwd=folder / "elsewhere", env=env)
    assert list((folder / "cache").glob("*/*/*/module.so")), "nothing was built: not a cold cache"
    where, csrc, include, values = json.loads(answer)
    assert values == EXPECTED
    return Path(where).resolve(), Path(csrc).resolve(), Path(include).resolve(), site.resolve()


def test_the_wheel_works(wheel, tmp_path):
    where, csrc, include, site = use_installed(wheel, tmp_path)
    assert where.parent == site / "sgl_moe_jit"
    assert (csrc, include) == (where.parent / "csrc", where.parent / "include")


def test_a_wheel_made_from_the_sdist_works(unpacked_sdist, tmp_path):
    where, csrc, _, site = use_installed(hatch(unpacked_sdist, "wheel", tmp_path / "d"), tmp_path)
    assert where.parent == site / "sgl_moe_jit"
    assert csrc == where.parent / "csrc"


def test_the_unpacked_sdist_works_in_place(unpacked_sdist, tmp_path):
    env = {**os.environ, "SGL_MOE_JIT_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = str(unpacked_sdist)
    answer = run([sys.executable, "-c", USE], cwd=unpacked_sdist, env=env)
    where, csrc, _, values = json.loads(answer)
    assert values == EXPECTED
    assert Path(where).parents[1] == Path(csrc).parent == unpacked_sdist.resolve()


def test_an_editable_install_works(checkout, tmp_path):
    where, csrc, include, _ = use_installed(
        hatch(checkout, "wheel:editable", tmp_path / "d"), tmp_path
    )
    assert where.parents[1] == checkout.resolve()
    assert (csrc, include) == (checkout.resolve() / "csrc", checkout.resolve() / "include")


def test_every_source_of_every_registered_module_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {
        f"sgl_moe_jit/{path.relative_to(ROOT).as_posix()}"
        for top in ("csrc", "include")
        for path in (ROOT / top).rglob("*")
        if path.is_file()
    }
    assert shipped <= names, f"not in the wheel: {sorted(shipped - names)}"
    named = {
        f"sgl_moe_jit/{unit.source.removeprefix('roots/')}"
        for family in families()
        for spec in (*family.cuda_specs(CudaArch.parse("9.0a")), *family.cpu_specs())
        for unit in spec.units
        if unit.text is None
    }
    assert named
    assert named <= names, f"not in the wheel: {sorted(named - names)}"
    assert {"sgl_moe_jit/jit/loader.py", "sgl_moe_jit/__main__.py"} <= names


def test_the_wheel_is_for_every_machine_and_carries_its_licence(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests/") or name.endswith(".so")]
