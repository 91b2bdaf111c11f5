"""`msa-tiles explain` of the shipped kernels: calls of several kernels, devices without a target, every refusal."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from msa_tiles import cli, ops, trees
from msa_tiles.explaining import explain as rehearse
from msa_tiles.explaining import rehearsal
from msa_tiles.explaining.examples import call_of
from msa_tiles.paths import specs_dir
from msa_tiles.runtime import dispatch, evidence, toolchain, tuned
from msa_tiles.runtime.pairs import Pair
from msa_tiles.runtime.parts import PARTS, jobs_for
from msa_tiles.runtime.registry import Precision, Registry, default_registry
from msa_tiles.spec import load
from msa_tiles.spec.model import ROLES
from msa_tiles.spec.reach import unreached

REGISTRY = default_registry()


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = cli.main(["explain", *arguments])
    out, error = capsys.readouterr()
    return status, out + error


@pytest.mark.parametrize("op", ["append_kv", "append_index", "topk_select", "decode_topk", "combine", "index_score"])
def test_kernels_of_every_kind_have_a_roofline(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens that are appended count as queries, and heads of a group follow from those of index queries and keys."""
    status, text = explain(capsys, op, "--device", "H200", "--queries", "4096")
    assert status == 0 and re.search(r"roofline [\d.]+ [um]s on NVIDIA H200", text), text


@pytest.mark.parametrize("op", [op for op in PARTS if not default_registry().of(op)])
def test_a_call_of_several_kernels_shows_each(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, op, "--device", "sm90", "--variant", "block_size=64", "head_dim=64")
    assert status == 0
    of_bf16 = {cell.op for cell in REGISTRY.select(precision="bf16")}
    assert set(PARTS[op]) - of_bf16 == {part for part in PARTS[op] if f"\nIt launches none of {part}," in text}
    for part in of_bf16.intersection(PARTS[op]):
        section = text[text.index(f"\n{part} on ") :].split("\n\n")[0]
        assert f"\nRuns {part}." in section
        if "block_size" in default_registry().of(part)[0].variants:
            assert "block_size=64" in section.splitlines()[1]


def test_parts_that_read_nothing_quantised_run_in_their_own_precision(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--precision", "q16kv8")
    assert status == 0
    assert "\nsparse_decode on NVIDIA H100 80GB HBM3 (sm90): q16kv8" in text
    assert "\ncombine on NVIDIA H100 80GB HBM3 (sm90): bf16" in text


# Of index keys. Calls carry the first one of those that only multiply differently.
INDEXED = {name: p for name, p in REGISTRY.precisions.items() if "index_key" in p.formats}
CARRIED = [name for name, p in INDEXED.items() if name == next(k for k, q in INDEXED.items() if q.formats == p.formats)]


@pytest.mark.parametrize("op", ["decode_score", "index_score", "select_blocks"])
@pytest.mark.parametrize("precision", CARRIED)
@pytest.mark.drawn(8)
def test_precisions_of_index_keys_are_served_as_the_launch_asks_for_kernels(
    op: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = call_of(op, {}, Pair(precision, "bf16"), 64, 64, 1, REGISTRY)
    [launched] = rehearse(getattr(ops, op), **call, device="sm90").kernels
    serving, widened = REGISTRY.serving(op, precision), "queries are widened to bfloat16, for kernels of"
    assert launched.cell is not None
    assert REGISTRY.precisions[launched.precision].formats == REGISTRY.precisions[serving].formats
    assert launched.notes == (() if serving == precision else (f"{widened} {serving}",))

    status, text = explain(capsys, op, "--device", "sm90", "--precision", precision)
    assert status == 0
    assert f"\nRuns {launched.cell}, from" in text
    assert (f"\n  {precision}: {widened} {serving}\n" in text) == (serving != precision) == (widened in text)
    status, text = explain(capsys, op, "--device", "sm90", "--precision", precision, "--json")
    [told] = json.loads(text)
    assert (told["runs"], told["precision"], told["widened"]) == (launched.cell, serving, serving != precision)

    [job] = jobs_for(f"{op},precision={precision}", REGISTRY, "sm90")
    assert job.cell.id == launched.cell


@pytest.mark.parametrize("precision", sorted(INDEXED.keys() - CARRIED))
def test_kernels_that_multiply_differently_are_candidates_of_each_other(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever of them is named: queries are not widened, and one that is verified runs. A form that is named is told
    to be one; why a kernel that serves the call does not run is said, and what the other one is off by.
    """
    [same] = [name for name in CARRIED if INDEXED[name].formats == INDEXED[precision].formats]
    for named in (same, precision):
        status, text = explain(capsys, "decode_score", "--device", "sm90", "--precision", named)
        assert status == 0 and "widened" not in text
        told = f"{precision} is a form of kernels of {same}, which no call chooses by name; calls of {same} run"
        assert text.startswith(told) == (named == precision)
        assert f"(sm90): {same}, " in text
        assert text.count("serves it as") == text.count("; does not run: ") + 1
        sized = explain(capsys, "decode_score", "--device", "sm90", "--precision", named, "--queries", "1")[1]
        assert (told in sized) == (named == precision)
        refused, beside = sized.count(": refuses: "), sized.count(": serves it, and does not run: ")
        assert refused + beside + 1 == len(REGISTRY.of("decode_score")) and beside >= 2
        for shown in (text, sized):
            assert "\n  worst errors on record (NVIDIA " in shown and "): out " in shown and ", accepted 0.01" in shown
        mine = [cell for cell in REGISTRY.of("decode_score") if cell.dsl == "cutedsl"]
        rivals = [cell.id for cell in mine if cell.precision in (same, precision)]
        assert len(rivals) == 2 and all(f"{each}: serves it" in text for each in rivals)
        [runs] = [cell for cell in REGISTRY.cells if cell.id == text.partition("\nRuns ")[2].partition(",")[0]]
        assert runs.precision in (same, precision) and evidence.has_run(runs, REGISTRY)


def with_a_form_of_attention() -> Registry:
    """The registry, and a twin of a part of attention that only multiplies differently; no such form is shipped."""
    [cell] = REGISTRY.select("shared_attention", "cutedsl", "sm90", "q16kv8")
    twin = dataclasses.replace(cell, id=f"{cell.id}m8", precision="q16kv8m8", digest="c" * 16)
    precisions = REGISTRY.precisions | {
        twin.precision: dataclasses.replace(REGISTRY.precisions["q16kv8"], name="q16kv8m8")
    }
    return dataclasses.replace(REGISTRY, cells=(*REGISTRY.cells, twin), precisions=precisions)


WITH_FORMS = with_a_form_of_attention()
FORMS = {cell.precision: cell for cell in WITH_FORMS.cells if WITH_FORMS.called(cell.precision) != cell.precision}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_compiled_for_a_form_that_is_named_is_the_form(form: str) -> None:
    cell = FORMS[form]
    op = "sparse_attention" if cell.op == "shared_attention" else cell.op
    jobs = jobs_for(f"{op},precision={form}", WITH_FORMS, cell.target)
    of_op = {job.cell.precision for job in jobs if job.cell.op == cell.op}
    assert of_op - {"bf16"} == {form}, "and copies of quantised keys"
    for none in ("select_blocks", "sparse_decode"):
        with pytest.raises(
            ValueError, match=rf"{none} has no kernels of {form} on .* form of kernels of \w+, which no"
        ):
            jobs_for(f"{none},precision={form}", WITH_FORMS, cell.target)
    with pytest.raises(ValueError, match=rf"{re.escape(cell.id)}.*: pages_per_block is 3"):
        jobs_for(f"{cell.op},precision={form},pages_per_block=3", WITH_FORMS, cell.target)


def test_rows_of_calls_are_found_for_the_form_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    [form] = REGISTRY.select(op="decode_score", precision="q16k4m8")
    rows = {"decode_score q16k4 cutedsl": [[0.06, 0.09]], "msa_decode q16k4+q16kv8 cutedsl": [[0.08, 0.1]]}
    measured = {"card": "a card", "target": form.target, "rows": rows}
    monkeypatch.setattr(rehearsal.expect, "_measured", lambda: measured)
    for op in ("decode_score", "msa_decode"):
        call = call_of(op, {}, Pair("q16k4", "q16kv8"), 1, 1 << 17, 32, REGISTRY)
        with dispatch.preferring(form):
            told = rehearse(getattr(ops, op), **call, device="H200")
        assert form.id in [kernel.cell for kernel in told.kernels]
        assert told.expectation is not None and told.expectation.ms is not None
        assert "; 1 row measured on a card)" in str(told.expectation)


@pytest.mark.parametrize("device", ["H200", "H100"])
def test_a_figure_of_this_very_call_stands_in_where_there_are_no_rows(device: str) -> None:
    [figure] = [
        each
        for each in tuned.figures_of(*REGISTRY.directories)
        if (each.op, each.target, each.precision, each.workload) == ("decode_score", "sm90", "q16k4", "decode_128k_b1")
    ]
    for keys, pages, is_it in ((1 << 17, 0, True), (1 << 17, 1, False), ((1 << 17) - 128, 0, False)):
        call = call_of("decode_score", {"pages_per_block": pages}, Pair("q16k4", "q16k4"), 1, keys, 1, REGISTRY)
        told = rehearse(ops.decode_score, **call, device=device)
        assert told.expectation is not None and (told.expectation.ms is not None) == is_it
        assert (f"timed as decode_128k_b1 on {figure.card})" in str(told)) == is_it
        if is_it:
            cell = told.kernels[0].cell
            assert cell is not None and told.expectation.ms is not None
            ratio = told.expectation.ms / figure.ms[cell]
            assert ratio == pytest.approx(1) if device in figure.card else ratio > 1.2


def test_a_figure_of_another_digest_is_of_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of("decode_score", {}, Pair("q16k4", "q16k4"), 1, 1 << 17, 1, REGISTRY)
    monkeypatch.setattr(tuned.Figure, "fresh", lambda *_: False)
    told = rehearse(ops.decode_score, **call, device="H200").expectation
    assert told is not None and told.ms is None


def test_the_tree_of_the_readme_keeps_calls_from_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (specs_dir().parent / "README.md").read_text(encoding="utf-8")
    [block] = [text for text in re.findall(r"```py\n(.*?)```", readme, re.S) if "tuned.json" in text]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    for keys in (1 << 14, 1 << 17, 1 << 20):
        call = call_of("decode_score", {}, Pair("q16k4", "q16k4"), 1, keys, 1, REGISTRY)
        with trees.use(tmp_path / "without_q16k4m8"):
            told = rehearse(ops.decode_score, **call, device="sm90", backend="cutedsl")
        assert told.kernels[0].cell == "decode_score.cutedsl.sm90.q16k4"
        form = next(each for each in told.kernels[0].asked if ".q16k4m8." in each.cell)
        assert form.refusal is None and form.why_not is not None and "has no figure" in form.why_not


def test_an_operator_that_has_kernels_of_neither_a_form_nor_its_precision_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, text = explain(capsys, "append_kv", "--device", "sm90", "--precision", "q16k4m8")
    assert (status, len(text.splitlines())) == (2, 1)
    assert (
        "--precision q16k4m8: append_kv has no kernels of it, nor of q16k4, of which it is a form, only of bf16" in text
    )


@pytest.mark.parametrize("sizes", [(), ("--queries", "4096")])
def test_an_answer_for_another_machine_may_be_that_of_one_with_both_dsls(
    sizes: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("combine", "--device", "H100", *sizes)
    whole = explain(capsys, *arguments)
    assert whole[0] == 0 and "--as-if-installed" not in whole[1]
    monkeypatch.setattr(toolchain, "missing", lambda dsl: f"{dsl} is not installed")
    status, text = explain(capsys, *arguments)
    assert status == 1 and "No kernel serves this call" in text and "installed: tilelang, cutedsl; --as-if-in" in text
    status, text = explain(capsys, *arguments, "--as-if-installed")
    assert status == 0 and "is not installed" not in text and "--as-if-installed" not in text
    runs = next(cell.id for cell in REGISTRY.of("combine") if f"Runs {cell.id}," in whole[1] or f"\n{cell.id} " in text)
    assert runs in text
    assert explain(capsys, *arguments)[0] == 1, "and what follows is of this machine again"


def test_a_form_is_not_compiled_in_the_place_of_what_calls_run() -> None:
    """That of a pair is honoured in its half; a group is of calls."""
    assert FORMS.keys() == {"q16k4m8", "q16kv8m8"}
    for registry in (REGISTRY, WITH_FORMS):
        jobs = jobs_for("msa_decode,precision=q16k4m8+q16kv8", registry, "sm90")
        [pair] = [job for job in jobs if job.cell.op == "decode_score"]
        assert pair.cell.precision == "q16k4m8"
    with pytest.raises(ValueError, match=r"no kernels of q16kv8m8 on sm90; .*: wanted precision=q8k8\+q16kv8$"):
        jobs_for("msa_decode,precision=q8k8+q16kv8m8", WITH_FORMS, "sm90")


SPECS = load(specs_dir())
OWN = {
    "q8kv8": {"query": "e4m3", "key_value": "e4m3"},
    "q16k8": {"query": "bf16", "index_key": "e4m3"},
    "q8k16": {"query": "e4m3", "index_key": "bf16"},
}


@pytest.mark.parametrize("op", [op for op, each in SPECS.operators.items() if op in ops.__all__ and each.roles])
@pytest.mark.drawn(5)
def test_rows_may_have_the_precisions_in_which_calls_come_to_dispatch(op: str) -> None:
    """What specs know of it is what validation and launches do, for precisions of one's own as well."""
    precisions = dict(SPECS.precisions)
    for name, roles in OWN.items():
        formats = {role: SPECS.formats[roles[role]] if role in roles else None for role in ROLES}
        precisions[name] = dataclasses.replace(precisions["bf16"], name=name, **formats)
    operator = SPECS.operators[op]
    read = [role for role in operator.roles if role != "output"]
    # What is normed and written comes in BF16.
    given = {"output": "bfloat16"} if "query" in read else {"output": "bfloat16", "query": "bf16"}
    own = {name: Precision(name, "fp8", {**roles, **given}) for name, roles in OWN.items()}
    registry = dataclasses.replace(REGISTRY, precisions={**REGISTRY.precisions, **own})
    for name, precision in precisions.items():
        if not set(read) <= precision.roles.keys() or (op, name) == ("dequantize_kv", "bf16"):
            continue
        pair = Pair(*(name if role in precision.roles else "bf16" for role in ("index_key", "key_value")))
        try:
            kernels = rehearse(getattr(ops, op), **call_of(op, {}, pair, 64, 64, 1, registry), device="sm90").kernels
        except (ValueError, TypeError):
            met = set()
        else:
            met = {each.precision for each in kernels if each.op == op} & registry.precisions.keys()
        reached = any(registry.precisions[each].agrees(registry.precisions[name], read) for each in met)
        assert reached == (unreached(operator, precision, precisions.values()) is None), name


INDEXERS, ATTENTIONS = (
    [name for name, precision in REGISTRY.precisions.items() if role in precision.formats]
    for role in ("index_key", "key_value")
)


@pytest.mark.parametrize("indexer", INDEXERS)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.drawn(10)
def test_a_pair_has_one_precision_for_index_keys_and_one_for_keys_and_values(
    indexer: str, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call = call_of("msa_decode", {}, Pair(indexer, attention), 2, 4096, 1, REGISTRY)
    launched = {each.op: each for each in rehearse(ops.msa_decode, **call, device="sm90").kernels}
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--precision", f"{indexer}+{attention}")
    assert status == 0
    of_index, of_values = REGISTRY.called(indexer), REGISTRY.called(attention)
    told = f"msa_decode in {of_index} (index keys) and {of_values} (keys and values) may launch"
    assert told in text and text.startswith(told) == ((indexer, attention) == (of_index, of_values))
    assert f"\ndecode_score on NVIDIA H100 80GB HBM3 (sm90): {of_index}, " in text
    assert f"\nsparse_decode on NVIDIA H100 80GB HBM3 (sm90): {of_values}, " in text
    assert all(f"\nRuns {launched[op].cell}, from" in text for op in ("decode_score", "sparse_decode", "combine"))
    jobs = jobs_for(f"msa_decode,precision={of_index}+{of_values}", REGISTRY, "sm90")
    assert {launched[op].cell for op in ("decode_score", "sparse_decode", "combine")} <= {job.cell.id for job in jobs}
    with_sizes = ("--precision", f"{indexer}+{attention}", "--queries", "2", "--keys", "4096")
    status, text = explain(capsys, "msa_decode", "--device", "sm90", *with_sizes)
    assert status == 0 and all(f"\n{each.cell}  " in text for each in launched.values())


@pytest.mark.parametrize("sizes", [(), ("--queries", "200")])
@pytest.mark.parametrize(
    ("op", "precision", "sentence"),
    [
        ("msa_decode", "q16kv8+q8k8", "did you mean q8k8+q16kv8?"),
        ("msa_decode", "q8k8+q8k8", "q8k8 says nothing of keys and values; known: bf16, q16kv8, "),
        ("msa_decode", "bf16+nvfp5", "--precision nvfp5 is unknown; did you mean nvfp4?"),
        ("sparse_decode", "q8k8+q16kv8", "it reads keys and values alone, wanted --precision q16kv8"),
        ("select_blocks", "fp8+q16kv4", "it reads index keys alone, wanted --precision q8k8"),
        ("index_kl", "q8k8+q16kv8", "index_kl has no kernels of it, only of bf16"),
        ("msa_attention", "q8k8", "because index_kl has none of q8k8+bf16, only of bf16; select_blocks and "),
        ("msa_attention", "bf16+q16kv8", "because index_kl has none of bf16+q16kv8, only of bf16"),
    ],
)
def test_a_pair_that_is_not_served_says_what_is(
    op: str, precision: str, sentence: str, sizes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = explain(capsys, op, "--device", "sm90", "--precision", precision, *sizes)
    assert status == 2 and sentence in text and text.count("\n") == 1


@pytest.mark.parametrize("op", [op for op in PARTS if op in ops.__all__])
@pytest.mark.parametrize("precision", [*REGISTRY.precisions, "fp8", "nvfp4", "fp4"])
@pytest.mark.drawn(26)
def test_every_precision_is_served_or_refused_with_those_that_are(
    op: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = explain(capsys, op, "--device", "sm90", "--precision", precision)
    sized, text_of_sizes = explain(capsys, op, "--device", "sm90", "--precision", precision, "--queries", "8")
    if status == 0:
        assert sized == 0
    else:
        assert f"{op} has kernels of bf16" in text or f"{op} has no kernels of it" in text
        named = precision if REGISTRY.of(op) else REGISTRY.called(precision)
        assert sized == 2 and f"--precision {named}: {op} has no kernels of it" in text_of_sizes


@pytest.mark.parametrize(
    ("device", "backend", "sentence"),
    [
        ("sm90", "auto", "On sm90 select_blocks has kernels of bf16, q16k4, q16kmx4, q8k8."),
        ("sm90", "cutedsl", "On sm90 select_blocks has cutedsl kernels of bf16, q16k4, q16kmx4, q8k8."),
        ("sm100", "auto", "On sm100 select_blocks has kernels of bf16."),
    ],
)
def test_a_precision_that_is_refused_comes_with_those_of_the_target_and_dsl(
    device: str, backend: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--precision", "q16kv8", "--device", device, "--backend", backend)
    status, text = explain(capsys, "select_blocks", *asked)
    assert status == 1 and f"\n{sentence}\n" in text


def test_queries_are_widened_where_several_keys_share_a_byte() -> None:
    assert REGISTRY.serving("select_blocks", "q8k4") == REGISTRY.serving("index_score", "q8k4") == "q16k4"
    assert REGISTRY.serving("index_score", "q8kmx4") == "q16kmx4"
    assert REGISTRY.serving("decode_score", "q8k4") == "q8k4"
    assert REGISTRY.serving("select_blocks", "q8k8") == "q8k8"
    assert REGISTRY.serving("select_blocks", "nvfp4") == "nvfp4"


@pytest.mark.parametrize("op", ["sparse_attention", "build_schedule", "msa_decode"])
def test_calls_of_cpu_tensors_run_on_the_reference(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [] if op == "build_schedule" else ["--queries", "16"]
    answers = [explain(capsys, op, "--device", "cpu", *more) for more in ([], sizes)]
    assert answers == [(0, f"{op} on cpu (no GPU)\n  runs on the reference in plain torch\n")] * 2
    status, text = explain(capsys, op, "--device", "cpu", "--json")
    assert status == 0
    assert {each["runs"] for each in json.loads(text)} == {"reference"}


def test_no_kernel_of_a_dsl_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "combine", "--device", "cpu", "--backend", "tilelang")
    assert status == 2
    assert "backend: got 'tilelang' for tensors on cpu; wanted 'auto' or 'reference'" in text


def test_a_call_that_nobody_serves_in_one_part_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--variant", "group=3")
    assert status == 1
    assert text.count("No kernel serves this call.") == 1


@pytest.mark.parametrize(
    "dims, at", [((), ""), (("head_dim=64",), "head_dim=128"), (("group=8", "head_dim=64"), "head_dim=128 group=16")]
)
def test_what_was_measured_at_other_dims_is_said_to_be_so(
    dims: tuple[str, ...], at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("sparse_attention", "--device", "sm90", "--backend", "cutedsl", *(("--variant", *dims) if dims else ()))
    status, text = explain(capsys, *asked)
    [line] = (line for line in text.splitlines() if line.startswith("Measured on"))
    assert status == 0 and line.partition(":")[0].split(", ")[2:] == ([f"at {at}"] if at else [])
    status, text = explain(capsys, *asked, "--json")
    assert json.loads(text)[0]["measured"]["variant"]["head_dim"] == 128


def test_dense_attention_has_no_kernel_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "dense_attention runs on FlashAttention-4 where it is installed and takes the call, else on torch's"
    assert explain(capsys, "dense_attention") == (0, f"{sentence} attention.\n")
    status, text = explain(capsys, "dense_attention", "--json")
    assert status == 0 and json.loads(text) == {"op": "dense_attention", "runs": "borrowed"}


def test_a_target_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "combine", "--device", "sm89")
    assert status == 2
    assert "no target serves a GPU of compute capability 8.9, a tree of your own can have one. Known: sm100 (" in text


def test_every_refusal_of_a_kernel_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device", "sm90", "--variant", "head_dim=96", "group=3", "--feature", "strided_unaligned")
    status, text = explain(capsys, "sparse_decode", *arguments)
    line = next(line for line in text.splitlines() if "sparse_decode.tilelang.sm90.bf16" in line)
    assert status == 1
    for sentence in (
        "head_dim is 96, wanted one of 64, 128",
        "group is 3, wanted one of",
        "not serve strided_unaligned",
    ):
        assert sentence in line


def test_a_call_of_given_sizes_is_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--queries", "1", "--keys", "131072", "--requests", "32", "--feature", "paged")
    status, text = explain(capsys, "msa_decode", "--device", "sm90", "--precision", "fp8", *sizes)
    assert status == 0
    first, second, *_ = text.splitlines()
    assert first == "msa_decode on NVIDIA H100 80GB HBM3 (sm90)"
    assert second.startswith("  2 launches, workspace ") and "roofline" in text
    assert "\ndecode_score." in text and "q8k8" in text and "\nsparse_decode." in text and "q16kv8" in text
    assert "pages_per_block=1" in text and "1 launch, grid 32 x 4 x 1" in text


@pytest.mark.parametrize("op", sorted(ops.__all__))
def test_every_operator_can_be_rehearsed(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    if op in ("Schedule", "decode_workspace_bytes", "dense_attention"):
        return
    status, text = explain(capsys, op, "--device", "sm90", "--queries", "256", "--keys", "4096", "--requests", "3")
    assert status == 0, text
    assert text.startswith(f"{op} on NVIDIA H100 80GB HBM3 (sm90)\n")


def test_a_call_of_given_sizes_that_nobody_serves(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--queries", "256", "--variant", "head_dim=96")
    status, text = explain(capsys, "sparse_attention", "--device", "sm90", *sizes)
    assert status == 1 and "it would raise NoKernelError" in text


def test_explanations_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "msa_decode", "--device", "sm90", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)
    assert [decision["op"] for decision in decisions] == list(PARTS["msa_decode"])
    for decision in decisions:
        assert decision["target"] == "sm90" and decision["runs"].startswith(f"{decision['op']}.")
        [runs] = [kernel for kernel in decision["kernels"] if kernel["cell"] == decision["runs"]]
        assert (runs["refusal"], runs["edited"]) == (None, False) and runs["origin"]
        assert all(kernel["refusal"] for kernel in decision["kernels"] if kernel["origin"] is None)
    assert cli.main(["explain", "combine", "--device", "sm90", "--queries", "64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["op"], told["served"], told["kernels"][0]["grid"][:2]) == ("combine", True, [64, 4])
    assert cli.main(["explain", "combine", "--device", "sm90", "--variant", "head_dim=96", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["runs"] is None


@pytest.mark.parametrize(
    ("op", "said", "shown"),
    [
        ("sparse_decode", ("--feature", "paged"), {"pages_per_block": 1}),
        ("sparse_decode", ("--feature", "paged", "--variant", "pages_per_block=2"), {"pages_per_block": 2}),
        ("sparse_decode", ("--variant", "pages_per_block=2"), {"pages_per_block": 2}),
        ("dequantize_kv", ("--precision", "q16kv8", "--variant", "paged=1"), {"paged": 1}),
    ],
)
def test_pages_are_asked_for_by_dim_or_by_feature(
    op: str, said: tuple[str, ...], shown: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["explain", op, "--device", "sm90", "--json", *said])
    [decision] = json.loads(capsys.readouterr().out)
    assert decision["features"] == ["paged"] and decision["variant"].items() >= shown.items()
    cli.main(
        ["explain", op, "--device", "sm90", "--json", *(word for word in said if word in ("--precision", "q16kv8"))]
    )
    [decision] = json.loads(capsys.readouterr().out)
    assert (decision["features"] == ["paged"]) == any(decision["variant"].get(dim) for dim in shown)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("combine", "--keys", "5"), "--keys and --requests need --queries"),
        (("combine", "--keys", "0"), "--keys and --requests need --queries"),
        (("combine", "--requests", "1"), "--keys and --requests need --queries"),
        (
            ("combine", "--queries", "65536", "--requests", "65536"),
            "--queries 65536 of each of --requests 65536 are 4,294,967,296 tokens, wanted at most 2,147,483,647",
        ),
        (
            ("combine", "--queries", "1", "--keys", "2000000000", "--requests", "2"),
            "--keys 2000000000 of each of --requests 2 are 4,000,000,000 tokens, wanted at most ",
        ),
        (("combine", "--queries", "-1"), "--queries is -1, wanted 0 to "),
        (("combine", "--queries", "99999999999"), "--queries is 99,999,999,999, wanted 0 to "),
        (("combine", "--queries", "5", "--requests", "99999999"), "--requests is 99,999,999, wanted 0 to 1,048,576"),
        (("combine", "--queries", "5", "--requests", "0"), "--requests is 0, wanted at least 1"),
        (("index_lse", "--queries", "5"), "index_lse is no operator to call, only a kernel of one"),
        (("sparse_decode", "--queries", "5", "--feature", "expanded"), "with --queries only paged can be said"),
        (
            ("sparse_attention", "--variant", "paged=1"),
            "--variant paged is a dim of a kernel that sparse_attention may",
        ),
        *(
            (
                ("sparse_decode", "--feature", "paged", "--variant", "pages_per_block=0", *asked),
                "says that keys are flat",
            )
            for asked in ((), ("--queries", "5"))
        ),
        *(
            ((op, "--queries", "5", "--variant", f"{dim}=0"), f"--variant {dim} is 0, wanted at least 1")
            for op, dim in (
                *(("sparse_attention", dim) for dim in ("block_size", "head_dim", "group")),
                *(("index_kl", "index_dim"), ("select_blocks", "heads_per_group"), ("topk_select", "topk")),
            )
        ),
        (
            ("msa_decode", "--queries", "5", "--variant", "pages_per_block=999"),
            "--variant pages_per_block is 999, wanted 0, or a divisor of block_size = 128",
        ),
        (
            ("append_kv", "--queries", "5", "--precision", "nvfp4", "--variant", "head_dim=8"),
            "append_kv takes no call of head_dim=8 float32_rows=0: data: got shape ",
        ),
    ],
)
def test_sizes_that_make_no_call(arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, *arguments, "--device", "sm90")
    assert status == 2 and sentence in text


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("H200", "NVIDIA H200 (sm90)"),
        ("h100", "NVIDIA H100 80GB HBM3 (sm90)"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe (sm90)"),
        ("gb300", "NVIDIA GB300 (sm103)"),
    ],
)
def test_a_card_stands_for_its_target(name: str, card: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = explain(capsys, "combine", "--device", name)
    assert text.startswith(f"combine on {card}")


@pytest.mark.parametrize("name", ["H20", "NVIDIA", "80GB A100"])
def test_a_card_that_no_spec_has_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "combine", "--device", name]) == 2
    told = capsys.readouterr().err
    assert f"--device {name} is unknown; " in told
    assert "cards such as H100, cuda, cuda:N and cpu are devices, too" in told
    assert cli.main(["build", "--target", "H1"]) == 2
    assert "--target H1 is unknown; known: sm100, sm103, sm90; a card such as H100 stands" in capsys.readouterr().err


@pytest.mark.parametrize("op", ["sparse_attention", "sparse_attention_backward", "index_kl", "msa_attention"])
@pytest.mark.parametrize("sizes", [((1 << 31) - 1, 1), ((1 << 11) - 1, 1 << 20)])
@pytest.mark.drawn(3)
def test_the_largest_calls_are_rehearsed_in_few_launches(
    op: str, sizes: tuple[int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting hundreds of thousands of windows one by one had taken minutes, or hours."""
    met: list[object] = []
    launch = rehearsal._Entry.__call__

    def counted(self: object, *arguments: object) -> None:
        met.append(self)
        assert len(met) < 100
        launch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rehearsal._Entry, "__call__", counted)
    queries, requests = map(str, sizes)
    asked = (op, "--device", "sm90", "--queries", queries, "--requests", requests, "--json")
    assert cli.main(["explain", *asked]) == 0
    assert sum(kernel["launches"] for kernel in json.loads(capsys.readouterr().out)["kernels"]) > 100_000


@pytest.mark.parametrize("op", ["sparse_attention", "msa_decode", "build_schedule"])
def test_no_queries_are_a_number_of_queries(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, op, "--device", "sm90", "--queries", "0", "--keys", "4096")
    assert status == 0 and ("0 launches" in text or "there is nothing to compute" in text)


def test_a_flag_that_no_call_has(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = explain(capsys, "sparse_decode", "--device", "sm90", "--queries", "5", "--batch-invariant")
    assert status == 0 and "batch_invariant: the bits of a row" in text
    status, text = explain(capsys, "combine", "--device", "sm90", "--queries", "5", "--batch-invariant")
    assert status == 2 and "--batch-invariant: combine has no such argument, leave it out; " in text
    assert "msa_decode, sparse_attention, sparse_decode have it" in text
    status, text = explain(capsys, "sparse_decode", "--device", "sm90", "--batch-invariant")
    assert status == 2 and "--batch-invariant needs --queries" in text


def test_a_precision_without_kernels_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "index_kl", "--device", "sm90", "--precision", "nvfp4"]) == 2
    assert "--precision nvfp4: index_kl has no kernels of it, only of bf16" in capsys.readouterr().err
    assert cli.main(["explain", "topk_select", "--device", "sm90", "--precision", "fp8"]) == 0
