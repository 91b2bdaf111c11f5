"""`msa-tiles demo`: the main job on a real text."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="select and attend over a real text, and check the result against dense attention",
        description="Regenerates and checks the kernels, embeds a real text, asks for phrases that occur far back, "
        "runs selection and sparse attention on the best device there is, and shows which blocks each question chose.",
    )
    parser.add_argument(
        "--text", type=Path, default=None, metavar="FILE", help="default: a text that ships with Python"
    )
    parser.add_argument("--tokens", type=int, default=16384, metavar="N", help="tokens of the text (default 16384)")
    parser.add_argument(
        "--out", type=Path, default=Path("msa_demo"), metavar="DIR", help="for the report and the picture (msa_demo)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the kernels are what the specs generate and the output agrees with dense attention.

    Missed questions do not fail the demo: they are a result, and shown. Raises ValueError for a text that cannot serve.
    """
    from msa_tiles import console, paths
    from msa_tiles.codegen import generate
    from msa_tiles.demo import device, kernels, picture, text
    from msa_tiles.demo import run as demo

    source = text.load(args.text, args.tokens)
    console.say("regenerating the kernels from the specs")
    count, differences = kernels.differences(paths.generated_dir(), lambda folder: generate(paths.specs_dir(), folder))
    for sentence in differences:
        console.say(f"  {sentence}")
    console.say(
        f"{count} kernels generated, " + ("NOT what is shipped" if differences else "equal to the shipped ones")
    )
    console.say(f"{len(source.ids):,} tokens of {source.source}, {len(source.vocabulary):,} different ones")
    report, block_indices, questions, prompt = demo.run(source, device.choose())
    demo.show(report)
    for file in demo.write(report, block_indices, questions, prompt, args.out):
        console.say(f"wrote {file}")
    if not picture.available():
        console.say("no picture: matplotlib is not installed (pip install matplotlib)")
    if not report.agrees:
        console.complain(f"the output does NOT agree with dense attention: error {report.error:.2e}")
    return 0 if report.agrees and not differences else 1
