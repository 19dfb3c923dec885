# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, results on stdout, progress on stderr, an exit status.

Each command imports what it runs when it runs, so ``--help`` and ``--version`` need no torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sgl_moe_jit import __version__
from sgl_moe_jit.errors import SglMoeJitError

# What to install for a module that a command imports.
_INSTALL = {
    "torch": "'torch>=2.10'",
    "tvm_ffi": "apache-tvm-ffi",
    "transformers": "'sgl-moe-jit[transformers]'",
    "numpy": "'sgl-moe-jit[bench]'",
}


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: As typed.
        help: One line.
        configure: Adds its arguments.
        run: Does it; returns the exit status.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def _configure_demo(parser: argparse.ArgumentParser) -> None:
    from sgl_moe_jit.bench.argument_types import numbers

    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(
        "--seeds", type=numbers, default=(1, 2, 3), metavar="N[,N...]", help="default: 1,2,3"
    )


def _demo(arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import demo, demo_report

    result = demo.run_demo(arguments.seeds, demo.choose_device(arguments.device))
    if arguments.json:
        _print_json(result.to_json())
    else:
        print(demo_report.render(result))
    return 0 if result.ok else 1


def _configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor(arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import doctor

    report = doctor.examine()
    if arguments.json:
        _print_json(report.to_json())
    else:
        print(doctor.render(report))
    return 0 if report.ok else 1


def _configure_compile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build kernels ahead of their first use. Without arguments: those this machine can run."
    )
    parser.add_argument(
        "--arch", metavar="ARCH[,ARCH...]", help="CUDA targets such as 9.0a,10.0a; needs no GPU"
    )
    parser.add_argument("--cpu", action="store_true", help="the CPU kernels")
    parser.add_argument(
        "--all", action="store_true", help="the CPU kernels and all common CUDA targets"
    )


def _compile(arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import ahead

    targets = ahead.choose_targets(arguments.arch, arguments.cpu, arguments.all)
    results = ahead.build(targets)
    for result in results:
        print(result.line())
    return 0 if all(not result.failures for result in results) else 1


def _configure_bench(parser: argparse.ArgumentParser) -> None:
    from sgl_moe_jit.bench import command

    command.configure(parser)


def _bench(arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import command

    return command.run(arguments)


# Another command is one more entry here.
COMMANDS: tuple[Command, ...] = (
    Command("demo", "a real model, stock against fused, on this machine", _configure_demo, _demo),
    Command(
        "doctor", "what was found, what is missing, and the remedy", _configure_doctor, _doctor
    ),
    Command("compile", "build kernels ahead of their first use", _configure_compile, _compile),
    Command("bench", "time the kernels beside their peers", _configure_bench, _bench),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_moe_jit",
        description="MoE finalize and shared-expert add in one kernel, compiled on first use.",
    )
    parser.add_argument("--version", action="version", version=f"sgl_moe_jit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help)
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


@contextmanager
def _progress_on_stderr() -> Iterator[None]:
    """Show this library's INFO lines on stderr; importing the library adds no handler."""
    logger = logging.getLogger("sgl_moe_jit")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Without the program's name; None takes ``sys.argv``.

    Returns:
        0, or 1 when the command found something wrong or could not run. Wrong usage exits with 2.
    """
    arguments = build_parser().parse_args(argv)
    with _progress_on_stderr():
        try:
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # The reader (`| head`) is gone; keep the interpreter's own flush at exit quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except ModuleNotFoundError as error:
            remedy = _INSTALL.get(error.name or "")
            hint = f". Install it with: pip install {remedy}" if remedy else ""
            print(f"error: {error}{hint}", file=sys.stderr)
            return 1
        except (SglMoeJitError, ImportError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
