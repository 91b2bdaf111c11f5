"""`msa-tiles demo`: the main job on a real text."""

from __future__ import annotations

import argparse
from pathlib import Path

from msa_tiles.files import refuse_unwritable
from msa_tiles.names import counted

TOKENS = 16384
MOST_STEPS = 10_000


def add(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="select and attend over a real text, and check the result; with --train: an indexer learns",
        description="Regenerates and checks the kernels, embeds a real text, asks for phrases that occur far back, "
        "runs selection and sparse attention on the best device there is, and shows which blocks each question chose. "
        "With --train an indexer that knows nothing learns by KL to select the blocks that dense attention looks at: a "
        "warm-up over the whole prefix, then over what it selects.",
    )
    parser.add_argument(
        "--text", type=Path, default=None, metavar="FILE", help="default: a text that ships with Python"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=None,
        metavar="N",
        help="tokens of the text (default 16384; with --train on a GPU more)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("msa_demo"),
        metavar="DIR",
        help="for report and picture (default msa_demo)",
    )
    parser.add_argument(
        "--precision",
        default="bf16",
        metavar="NAME",
        help="what keys, values and index keys are stored in: bf16, fp8, nvfp4 or fp4 (default bf16)",
    )
    parser.add_argument("--train", action="store_true", help="train an indexer instead")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        metavar="N",
        help="with --train: steps of training (default 120, 300 on a GPU)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the kernels are what the specs generate and the output agrees with dense attention.

    Missed questions do not fail the demo: they are a result, and shown. Raises ValueError for a text that cannot serve.
    """
    from msa_tiles import names
    from msa_tiles.demo.precision import BF16, FORMATS

    names.check("--precision", [args.precision], FORMATS)
    if args.train:
        if args.precision != BF16:
            raise ValueError(f"--precision: got {args.precision}; --train takes bf16, as gradients do")
        return _train(args)
    if args.steps is not None:
        raise ValueError("--steps: only --train takes steps")
    import torch

    from msa_tiles import console, paths, trees
    from msa_tiles.codegen import generate
    from msa_tiles.demo import device, kernels, picture, text
    from msa_tiles.demo import run as demo

    refuse_unwritable("--out", args.out, directory=True)
    source = text.load(args.text, TOKENS if args.tokens is None else args.tokens)
    text.refuse_runaway(source, torch.cuda.is_available())
    console.say("regenerating the kernels from the specs")
    count, differences = kernels.differences(paths.generated_dir(), lambda folder: generate(paths.specs_dir(), folder))
    for sentence in differences:
        console.say(f"  {sentence}")
    console.say(
        f"{counted(count, 'kernel file')} generated{' of the shipped specs, without trees' if trees.stack() else ''}, "
        + ("NOT what is shipped" if differences else "equal to the shipped ones")
    )
    for sentence in kernels.of_trees():
        console.say(sentence)
    console.say(f"{len(source.ids):,} tokens of {source.source}, {len(source.vocabulary):,} different ones")
    place = device.choose(args.precision)
    text.refuse_runaway(source, place.torch_device.type == "cuda")
    report, block_indices, questions, prompt = demo.run(source, place, args.precision)
    demo.show(report)
    if trees.stack():
        console.say(kernels.behind(place.torch_device, args.precision))
    for file in demo.write(report, block_indices, questions, prompt, args.out):
        console.say(f"wrote {file}")
    if not picture.available():
        console.say(picture.UNAVAILABLE)
    if not report.agrees:
        console.complain(f"the output does NOT agree with dense attention: error {report.error:.2e}")
    return 0 if report.agrees and not differences else 1


def _train(args: argparse.Namespace) -> int:
    """Exit code 0 when the indexer has learnt to select what dense attention looks at."""
    import dataclasses

    from msa_tiles import console
    from msa_tiles.demo import picture, text, train

    if args.steps is not None and args.steps < 2:
        raise ValueError(f"--steps: {args.steps}, wanted at least 2: one of warm-up and one over the selection")
    if args.steps is not None and args.steps > MOST_STEPS:
        raise ValueError(f"--steps: {args.steps:,}, wanted at most {MOST_STEPS:,}: the indexer learns in some hundred")
    refuse_unwritable("--out", args.out, directory=True)
    place = train.choose_place()
    if args.steps is not None:
        place = dataclasses.replace(place, course=place.course.shortened(args.steps))
    source = text.load(args.text, max(TOKENS, place.course.text_tokens) if args.tokens is None else args.tokens)
    console.say(f"{len(source.ids):,} tokens of {source.source}, {len(source.vocabulary):,} different ones")
    report = train.run(source, place)
    train.show(report)
    for file in train.write(report, args.out):
        console.say(f"wrote {file}")
    if not picture.available():
        console.say(picture.UNAVAILABLE)
    if not report.learnt:
        after = report.after
        console.complain(
            f"the indexer has NOT learnt its task: recall {after.mass:.1%}, possible {after.best_mass:.1%}"
        )
    return 0 if report.learnt else 1
