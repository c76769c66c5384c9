"""The command ``treegrpo``: LoRA files for other programs, judgements as a dataset, a reward as a server.

The same as ``python -m treegrpo_core.cli``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES, OTHER, Architecture, architecture_named
from .human_log import write_dataset
from .lora import FORMATS, write
from .lora.file import read_any
from .lora.inspect import describe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, or 2 with one line on stderr if it could not be done."""
    from safetensors import SafetensorError

    options = _parser().parse_args(arguments)
    try:
        print(options.command(options))
    except (ValueError, OSError, OverflowError, ImportError, SafetensorError) as error:
        print(f"treegrpo: {error}", file=sys.stderr)
        return 2
    return 0


def export(options: argparse.Namespace) -> str:
    """Convert a LoRA file; returns what to print."""
    if options.output.exists():
        raise ValueError(f"--output {options.output} exists; nothing is overwritten, choose another name")
    if options.output.suffix != ".safetensors":
        raise ValueError(f"--output {options.output} must end in .safetensors, by which programs know what it is")
    found = read_any(options.file, _family(options))
    if not options.without_text_encoder:
        found.refuse_text_encoder()
    found.refuse_other_magnitudes(options.to)
    file = found.file
    write(options.output, file, options.to)
    said = f"{options.output}: {file.architecture.name}, {len(file.layers)} layers, in the format {options.to}"
    return "\n".join([said, *(f"note: {note}" for note in found.notes)])


def inspect(options: argparse.Namespace) -> str:
    """Describe a LoRA file; returns what to print."""
    return describe(options.file, _family(options))


def serve_reward(options: argparse.Namespace) -> str:
    """Serve a reward until Ctrl-C; returns what to print then."""
    from .serve import serve

    say = partial(print, flush=True)
    return serve(options.name, options.source, options.host, options.port, options.models, say)


def human(options: argparse.Namespace) -> str:
    """Write what people judged in a run as a dataset; returns what to print."""
    count = write_dataset(options.run, options.output)
    return f"{options.output}: {count} judged prompts; their pictures are in {options.run}"


def _family(options: argparse.Namespace) -> Architecture | None:
    return architecture_named(options.architecture) if options.architecture else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treegrpo", description="LoRA files of TreeGRPO and of other programs; rewards and judgements."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command, text in (
        (export, "Write a LoRA file in another program's format, with the same effect."),
        (inspect, "Say what a LoRA file is, where it comes from and which programs load it."),
    ):
        added = commands.add_parser(command.__name__, help=text, description=text)
        added.set_defaults(command=command)
        text = "LoRA file (.safetensors) in any of the formats, or the folder of an adapter that PEFT saved"
        added.add_argument("file", type=Path, metavar="FILE", help=text)
        added.add_argument(
            "--architecture",
            choices=[entry.name for entry in (*ARCHITECTURES, OTHER)],
            help="model family, for files that do not tell ('other': none of these; layers keep their names)",
        )
        if command is export:
            added.add_argument("--to", required=True, choices=FORMATS, help="format to write")
            added.add_argument("--output", required=True, type=Path, metavar="PATH", help="new file to write")
            added.add_argument(
                "--without-text-encoder",
                action="store_true",
                help="leave out adapters of text encoders, which the formats here do not carry",
            )
    _add_serve_reward(commands)
    text = "Write the judgements of TreeGRPO Human Reward as a dataset: one JSON line per judged prompt."
    added = commands.add_parser("human", help=text, description=text)
    added.set_defaults(command=human)
    added.add_argument("run", type=Path, metavar="RUN_FOLDER", help="folder of the run, output/treegrpo/<run>")
    added.add_argument("--output", required=True, type=Path, metavar="PATH", help="new file to write (.jsonl)")
    return parser


def _add_serve_reward(commands: Any) -> None:
    text = "Serve a reward over HTTP, for the reward 'remote' of another computer or environment."
    added = commands.add_parser("serve-reward", help=text, description=text)
    added.set_defaults(command=serve_reward)
    added.add_argument("name", metavar="NAME", help="name of the reward")
    added.add_argument("--source", default="", help="the reward's source: a file, an address or a target")
    added.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    added.add_argument("--port", default=8189, type=int, help="port to listen at (default: %(default)s)")
    added.add_argument("--models", type=Path, metavar="FOLDER", help="where the reward's checkpoints are")


if __name__ == "__main__":
    sys.exit(main())
