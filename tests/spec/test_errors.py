"""Each mistake in a spec is reported with the file and the line it stands on."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from seeds import examples

from msa_tiles import paths
from msa_tiles.spec import SpecError, load

ATTENTION = "operators/sparse_attention.yaml"
BACKWARD = "operators/sparse_attention_backward.yaml"
SELECT = "operators/select_blocks.yaml"
TOPK = "operators/topk_select.yaml"
SM90 = "targets/sm90.yaml"
PRECISIONS = "precisions.yaml"


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(paths.specs_dir(), tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "specs"


# name: (file, text whose first occurrence is changed, what it becomes, lines from there to the reported one, sentence)
# fmt: off
MISTAKES = {
    "unknown key":
        (ATTENTION, "summary:", "sumary: x\nsummary:", 0, "unknown key 'sumary' in the file; did you mean 'summary'"),
    "unknown key of a row":
        (ATTENTION, "    mma: wgmma", "    colour: red", 0, r"unknown key 'colour' in kernels\[0\]"),
    "duplicate key":
        (ATTENTION, "reference:", "reference: a\nreference:", 1, "duplicate key 'reference'.* it is first on line 3"),
    "duplicate key of a flow mapping":
        (TOPK, "{topk: 8}", "{topk: 8, topk: 8}", 0, "duplicate key 'topk'"),
    "missing key": (ATTENTION, "reference: sparse_attention\n", "", -2, "the file lacks the key 'reference'"),
    "mapping wanted": (ATTENTION, "  bf16: {out: 0.03, lse: 0.005}", "  bf16: 3", 0, "must be a mapping"),
    "list wanted": (ATTENTION, "    copy: [tma_load, tma_store]", "    copy: tma_load", 0, "must be a list"),
    "single value wanted": (ATTENTION, "    mma: wgmma", "    mma: [a]", 0, "must be a single value"),
    "text wanted": (ATTENTION, "    mma: wgmma", "    mma: 3", 0, "mma must be text, not 3"),
    "integer wanted": (ATTENTION, "topk: 16}", "topk: many}", 0, "topk must be an integer, not 'many'"),
    "bool is no integer": (ATTENTION, "topk: 16}", "topk: true}", 0, "topk must be an integer, not True"),
    "number too small": (ATTENTION, "topk: 16}", "topk: 0}", 0, "topk is 0; it must be at least 1"),
    "number wanted": (ATTENTION, "out: 0.03", "out: small", 0, "out must be a number, not 'small'"),
    "true or false wanted": (ATTENTION, "default: false", "default: 'no'", 0, "must be true or false, not 'no'"),
    "hexadecimal": (ATTENTION, "topk: 16}", "topk: 0x10}", 0, "write a plain decimal number"),
    "no YAML": (ATTENTION, "reference: ", "reference: [", 2, "not valid YAML"),
    "no legal choice":
        (ATTENTION, "dsl: tilelang", "dsl: triton", 0, "dsl is 'triton'; it must be one of tilelang, cutedsl"),
    "item twice": (ATTENTION, "[tma_load, tma_store]", "[tma_load, tma_load]", 0, "lists 'tma_load' twice"),
    "op of another file":
        (ATTENTION, "op: sparse_attention", "op: dense", 0, "op is 'dense' in a file named sparse_attention.yaml"),
    "unknown name in a shape":
        (ATTENTION, "q: {shape: [total_q,", "q: {shape: [total,", 0, "uses total; known names: head_dim, block_size"),
    "no arithmetic": (ATTENTION, "- topk <= 64", "- topk.real <= 64", 0, "specs may not use"),
    "unused dim": (ATTENTION, "  topk: runtime", "  topk: runtime\n  pages: runtime", 1, "dim 'pages' is used by no"),
    "dim of another type": (ATTENTION, "  topk: runtime", "  topk: sometimes", 0, "dims.topk uses sometimes"),
    "derived position dim":
        (ATTENTION, "  total_k: runtime", "  total_k: 2 * topk", 0, "follows from a call"),
    "dim with the name of a quantity":
        (ATTENTION, "  topk: runtime", "  visible_keys: runtime", 0, "a roofline quantity"),
    "variants of unlisted dims":
        (ATTENTION, "exact: [head_dim, block_size, group, pages_per_block, token_scales]", "exact: [head_dim]", -1,
         "must name each of head_dim"),
    "variant point out of range":
        (ATTENTION, "block_size: 64, group: 8,", "block_size: 96, group: 8,", 0, "block_size 96 is none of its"),
    "variant point twice":
        (ATTENTION, "block_size: 64, group: 8, pages_per_block: 1, token_scales: 1}",
         "block_size: 128, group: 16, pages_per_block: 0, token_scales: 0}",
         0, "stands twice in variants.ci"),
    "pair of values that never meets":
        (SELECT, "    - {head_dim: 128, block_size: 64, topk: 64, heads_per_group: 4, pages_per_block: 8, "
         "key_scales: 1}\n", "", -5, "no point of variants.ci has .*; every pair of values must meet"),
    "M3 is not first":
        (TOPK, "    - {topk: 16}\n", "", -1, "must begin with the first value of each dim"),
    "no value for a dim":
        (ATTENTION, "defaults: {num_kv_heads: 4, topk: 16}", "defaults: {topk: 16}", 2, "no value for the dim 'num_"),
    "selection where no ids are read":
        (SELECT, "{label: ties", "{selection: uniform, label: ties", 0, "takes no `selection`"),
    "selection missing":
        (ATTENTION, "[[4096, 4096]], selection: sticky", "[[4096, 4096]]", 0, "needs `selection`, one of uni"),
    "label twice": (ATTENTION, "label: medium", "label: one_token", 0, "has the label 'one_token' twice"),
    "workload breaks a rule": (ATTENTION, "topk: 5, points", "topk: 65, points", 0, "breaks the rule `topk <= 64`"),
    "lengths": (ATTENTION, "[[4096, 4096]], sel", "[[4096]], sel", 0, r"sequences\[0\] must be \[queries, keys\]"),
    "integers with a tolerance":
        (SELECT, "bf16: {out: 0}", "bf16: {out: 1}", None, "holds integers, so its tolerance for bf16 must be 0"),
    "tolerance of an unknown precision":
        (SELECT, "  bf16: {out: 0}", "  bf17: {out: 0}", None, "tolerance names the precision 'bf17'; known: bf16"),
    "tolerance of ranked scores":
        (SELECT, "score: 0.1}", "score: small}", 0, "score must be a number, not 'small'"),
    "scales of a dim that is none":
        (SELECT, "scaled: [key_scales]", "scaled: [topk]", 0, "scaled.* 'topk'; it must be one of head_dim"),
    "tolerance of no output": (SELECT, "bf16: {out: 0}", "bf16: {ids: 0}", 0, "unknown key 'ids' in tolerance.bf16"),
    "unknown target": (TOPK, "targets: [sm90]", "targets: [sm91]", 0, "unknown target 'sm91'; known: sm100, sm103"),
    "unknown precision": (ATTENTION, "precisions: [bf16]", "precisions: [int4]", 0, "unknown precision 'int4'"),
    "unknown mma kind": (TOPK, "mma: simt", "mma: tcgen05", 0, "unknown mma 'tcgen05'; sm90 has wgmma, simt"),
    "mma kind of no target": (ATTENTION, "mma: wgmma", "mma: mma", 0, "unknown mma 'mma'; .*; sm90 has wgmma"),
    "unknown copy engine": (ATTENTION, "[tma_load, tma_store]", "[tensor_memory]", 0, "sm90 has no copy engine"),
    "precision the target cannot compute":
        (ATTENTION, "    mma: wgmma", "    mma: simt", -1,
         "sm90 simt cannot compute 'bfloat16'; it multiplies float32, int32"),
    "element that stands in the precision":
        (ATTENTION, "    mma: wgmma", "    compute: bfloat16\n    mma: wgmma", 0, "must be one of float32, int32"),
    "no tolerance": (SELECT, "precisions: [bf16]", "precisions: [q16k4m8]", 0, "states no tolerance for q16k4m8"),
    "group in the place of precisions":
        (SELECT, "precisions: [bf16]", "precisions: [nvfp4]", 0,
         "unknown precision 'nvfp4', which is a group: a row names precisions, such as its q16k4, q16k4m8$"),
    "tolerance of a group":
        (SELECT, "  q8k8: {out", "  fp8: {out", None, "the precision 'fp8', which is a group: .* such as its q8k8"),
    "architecture without underscore":
        (SM90, "arch: sm_90a", "arch: sm90a", 0, r"arch must be sm_90 or sm_90a to agree .*, not 'sm90a'"),
    "letter that nvcc does not know there": (SM90, "arch: sm_90a", "arch: sm_90f", 0, "must be sm_90 or sm_90a to"),
    "architecture without the letter of its instructions":
        (SM90, "arch: sm_90a", "arch: sm_90", 0, r"for which no wgmma \(HGMMA\) is compiled; write sm_90a"),
    "precision of queries that are widened":
        (SELECT, "precisions: [bf16]", "precisions: [q8kmx4]", 0,
         "no call of select_blocks reaches a kernel of q8kmx4: its queries are widened to bfloat16 .* of q16kmx4"),
    "precision with scales that kernels do not take":
        (BACKWARD, "precisions: [bf16]", "precisions: [q16kv8]", 0,
         "no call of sparse_attention_backward reaches .* no scales of key_value, which e4m3 has; .* kernels of bf16"),
    "precision without what the operator reads":
        (SELECT, "precisions: [bf16]", "precisions: [q16kv8]", 0, "q16kv8 has no index_key, which select_blocks reads"),
    "no target at all": (TOPK, "targets: [sm90]", "targets: []", 0, "targets must name at least one"),
    "precision twice": (ATTENTION, "precisions: [bf16]", "precisions: [bf16, bf16]", 0, "lists 'bf16' twice"),
    "only of a dim that is none":
        (ATTENTION, "    mma: wgmma", "    only: {width: [1]}\n    mma: wgmma", 0,
         "only names 'width', which is none of the exact dims of sparse_attention: head_dim, "),
    "only without the first value":
        (ATTENTION, "    mma: wgmma", "    only: {head_dim: [64]}\n    mma: wgmma", 0,
         "head_dim 64: wanted some but not all of 128, 64, 128 first"),
    "only of all values":
        (ATTENTION, "    mma: wgmma", "    only: {head_dim: [128, 64]}\n    mma: wgmma", 0,
         "head_dim 128, 64: wanted some but not all of 128, 64, 128 first"),
    "adjustment of no cell":
        (ATTENTION, "    mma: wgmma", "    adjust: {sm100: {threads: '128'}}\n    mma: wgmma", 0,
         "adjust names 'sm100', which is neither a target nor a precision of the row"),
    "empty adjustment":
        (ATTENTION, "    mma: wgmma", "    adjust: {bf16: {}}\n    mma: wgmma", 0, "bf16 changes nothing"),
    "key that no adjustment takes":
        (ATTENTION, "    mma: wgmma", "    adjust: {bf16: {dsl: cutedsl}}\n    mma: wgmma", 0, "unknown key 'dsl' in"),
    "operand of a role that is none":
        (ATTENTION, "    mma: wgmma", "    operands: {values: plain}\n    mma: wgmma", 0, "unknown key 'values' in"),
    "no operand": (ATTENTION, "    mma: wgmma", "    operands: {}\n    mma: wgmma", 0, "names no operand"),
    "operand of a role that the operator has not":
        (ATTENTION, "    mma: wgmma", "    operands: {index_key: plain}\n    mma: wgmma", 0,
         "attention reads no index_key"),
    "tile named like a dim":
        (ATTENTION, "tile: {stages: 5", "tile: {group: 1, stages: 5", 0, "tile name 'group' is also a compile-time"),
    "undeclared feature":
        (ATTENTION, "    features: [paged, q_positions]", "    features: [teleport]", 0, "'teleport' is none of those"),
    "no opcode": (ATTENTION, "expect: [SYNCS", "expect: [syncs", 0, "'syncs' is no SASS opcode"),
    "arch of another capability":
        (SM90, "capability: [9, 0]", "capability: [8, 0]", -1, "arch must be sm_80 to agree"),
    "target of another file": (SM90, "target: sm90", "target: sm80", 0, "target is 'sm80' in a file named sm90.yaml"),
    "unknown default device":
        (SM90, "default_device: NVIDIA H100", "default_device: A100", 0, "'A100 80GB HBM3' is none of the devices"),
    "peak of no element":
        (SM90, "float32: 66.9}", "int8: 66.9}", 0, "peak_tflops names 'int8', which no mma kind of"),
    "shared memory": (SM90, "{per_block: 232448,", "{per_block: 999999,", 0, "per_block 999999 exceeds per_sm 233472"),
    "needed and forbidden": (SM90, "forbid: [HMMA] ", "forbid: [HGMMA] ", 0, "forbids HGMMA, which bfloat16 needs"),
    "thread group": (SM90, "thread_group: 128", "thread_group: 100", 0, "thread_group 100 must be whole warps"),
    "bits that do not fill the storage":
        (PRECISIONS, "bits: 16", "bits: 8", 0, "1 x 8 bits do not fill one bfloat16 of 16 bits"),
    "group without its size": (PRECISIONS, "per: [group], group: 32", "per: [group]", 0, "group must be given exactly"),
    "element that no target multiplies":
        (PRECISIONS, "multiply: bfloat16", "multiply: float16", 0, "bf16 multiplies 'float16', which no target does"),
    "unknown format": (PRECISIONS, "key_value: e4m3", "key_value: e5m2", 0, "it must be one of bf16, e4m3"),
    "precision without keys":
        (PRECISIONS, "key_value: e4m3, ", "", 0, "precision 'q16kv8' needs key_value, index_key or both"),
    "two formats of keys":
        (PRECISIONS, "index_key: bf16", "index_key: e4m3", 0, "one format for key_value and index_key"),
    "combination twice":
        (PRECISIONS, "  q8k8:", "  twin: {query: bf16, key_value: e4m3, multiply: bfloat16, output: bfloat16}\n  q8k8:",
         0, "precision 'twin' is the same combination as 'q16kv8'"),
    "code for a reference":
        (TOPK, "reference: topk_select", 'reference: "a\\nimport os"', 0, r"reference holds the character U\+000A"),
    "reference that is none":
        (TOPK, "reference: topk_select", "reference: os", 0, "'os' is no function of msa_tiles.reference; it has"),
    "reference with a path":
        (TOPK, "reference: topk_select", "reference: plain.topk", 0, "'plain.topk' is no name; wanted a letter, then"),
    "line separator in a summary":
        (TOPK, "summary: ", 'summary: "a\\u2028b" #', 0, r"summary holds the character U\+2028"),
    "line separator in the file": (TOPK, "summary: ", "summary: \u2028", 0, r"the line holds the character U\+2028"),
    "bell in the file": (TOPK, "summary: ", "summary: \a", 0, r"the line holds the character U\+0007"),
    "text turned round": (TOPK, "summary: ", "summary: \u202e", 0, r"the line holds the character U\+202E"),
    "name that leaves its directory":
        (ATTENTION, "    mma: wgmma", "    algorithm: ../../x\n    mma: wgmma", 0, r"'\.\./\.\./x' is no name"),
    "name that is a word of Python": (TOPK, "  out:", "  class:", 0, "'class' is no name; wanted a letter"),
    "name that begins with an underscore": (PRECISIONS, "  q8k8:", "  __init__:", 0, "'__init__' is no name"),
    "name of other letters": (PRECISIONS, "  q8k8:", "  qß:", 0, "'qß' is no name"),
    "operand that is a path":
        (ATTENTION, "    mma: wgmma", "    operands: {key_value: a/b}\n    mma: wgmma", 0, "'a/b' is no name"),
    "label with a space": (ATTENTION, "label: one_token", "label: one token", 0, "has letters, digits and _ alone"),
    "infinite tolerance": (ATTENTION, "out: 0.03", "out: 1.0e+400", 0, "out is inf; it must be finite"),
    "no tolerance at all": (ATTENTION, "out: 0.03", "out: .nan", 0, "write a plain decimal number"),
    "tile of nothing": (ATTENTION, "tile: {stages: 5", "tile: {stages: 0", 0, "stages is 0; it must be at least 1"),
    "number beyond measure": (ATTENTION, "topk: 16}", f"topk: {10**30}}}", 0, r"topk is 1e\+30; it must be at most 2"),
    "more digits than an integer has": (ATTENTION, "topk: 16}", f"topk: {'9' * 5000}}}", 0, "write a plain decimal"),
    "request beyond measure": (ATTENTION, "[[4096, 4096]], sel", "[[4096, 999999999]], sel", 0, "of at most 134217728"),
    "min of one": (ATTENTION, "- topk <= 64", "- topk <= min(64)", 0, "calls min with 1 arguments, wanted two"),
    "ceildiv of three":
        (ATTENTION, "- topk <= 64", "- ceildiv(topk, 2, 3) <= 64", 0, "calls ceildiv with 3 arguments, wanted two"),
    "more terms than an evaluation takes":
        (ATTENTION, "- topk <= 64", f"- topk <= {'+'.join('1' * 300)}", 0, "too many terms: 400 at most, 32 deep"),
    "longer than an expression is":
        (ATTENTION, "- topk <= 64", f"- topk <= {'+'.join('1' * 1500)}", 0, "an expression of 3007 characters, wanted"),
    "deeper than an evaluation goes":
        (ATTENTION, "- topk <= 64", f"- topk <= {'-' * 200}64", 0, "too many terms"),
    "parentheses that a parser does not take":
        (ATTENTION, "- topk <= 64", f"- topk <= {'(' * 400}64{')' * 400}", 0, "is not an expression"),
    "anchor": (ATTENTION, "precisions: [bf16]", "precisions: &all [bf16]", 0, "specs have no anchors"),
    "circle of aliases": (ATTENTION, "precisions: [bf16]", "precisions: &a [*a]", 0, "specs have no anchors"),
    "lists in lists": (ATTENTION, "topk: 16}", f"topk: {'[' * 500}{']' * 500}}}", 0, "lie more than 24 deep"),
    "tag of a scalar": (ATTENTION, "topk: 16}", "topk: !!python/object/apply:os.system ls}", 0, "write a plain"),
    "tag of a list":
        (ATTENTION, "precisions: [bf16]", "precisions: !!python/tuple [bf16]", 0, "has the tag .*; specs have none"),
    "tag of a mapping":
        (ATTENTION, "  bf16: {out", "  bf16: !!python/object:os.x {out", 0, "has the tag .*; specs have none"),
    "name of another group": (PRECISIONS, "  q8k8:", "  nvfp4:", 0, "'nvfp4' has the name of a group that it does not"),
}
# fmt: on


# How many mistakes there are where one change makes several.
CONSEQUENCES = {
    "unknown key of a row": 2,  # mma is lacking, too
    "dim with the name of a quantity": 4,  # topk was used in three places
    "no value for a dim": 16,  # of each workload
    "tolerance of no output": 2,  # out is lacking, too
    "name that is a word of Python": 3,  # out is unknown, class is lacking
}


LACKING = {
    "targets/sm103x.yaml": (
        "target: sm103x\nsummary: x\narch: sm_103a\ncapability: [10, 3]\n",
        "'devices', 'default_device', .*'forbid'; with `inherits: sm100` .* \\(or from sm103, sm90\\)",
    ),
    "targets/sm90.yaml": ("target: sm90\nsummary: x\n", "'arch', .*; with `inherits: sm90` it has .* itself"),
    "operators/combine.yaml": ("op: combine\n", "'summary', .*'kernels'; with `inherits: combine` it has .* itself"),
}


@pytest.mark.parametrize("file", LACKING)
def test_a_file_that_may_have_forgotten_to_inherit(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys that it lacks in one sentence, with where it could have them from."""
    monkeypatch.chdir(tmp_path)
    text, sentence = LACKING[file]
    (tmp_path / "own" / file).parent.mkdir(parents=True)
    (tmp_path / "own" / file).write_text(text)
    with pytest.raises(SpecError) as caught:
        load(paths.specs_dir(), tmp_path / "own")
    assert re.fullmatch(f"own/{file}:1: the file lacks the keys {sentence}", str(caught.value))


def test_an_operator_that_nothing_lies_beneath_can_inherit_nothing(tmp_path: Path) -> None:
    (tmp_path / "operators").mkdir()
    (tmp_path / "operators/other.yaml").write_text("op: other\n")
    with pytest.raises(SpecError, match=r"the file lacks the key 'summary'\n.*the file lacks the key 'reference'\n"):
        load(paths.specs_dir(), tmp_path)


def test_outputs_that_calls_do_not_have(specs: Path) -> None:
    text = (specs / PRECISIONS).read_text()
    old = "e4m3, multiply: bfloat16, output: bfloat16}"
    (specs / PRECISIONS).write_text(text.replace(old, old.replace("output: bfloat16", "output: float32")))
    with pytest.raises(SpecError) as caught:
        load(specs)
    told = [each.sentence for each in caught.value.mistakes if "sparse_decode" in each.where.file]
    assert told and all("kernel of q16kv8: its outputs are bfloat16, and not float32, where" in each for each in told)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.drawn(13)
def test_mistake(name: str, specs: Path) -> None:
    file, old, new, offset, sentence = MISTAKES[name]
    text = (specs / file).read_text()
    assert text.count(old) >= 1, "the test looks for text that the spec no longer holds"
    at = text.index(old)
    (specs / file).write_text(text[:at] + new + text[at + len(old) :])
    with pytest.raises(SpecError, match=sentence) as caught:
        load(specs)
    mistakes = caught.value.mistakes
    assert str(caught.value) == "\n".join(f"{mistake.where}: {mistake.sentence}" for mistake in mistakes)
    found, *_ = [mistake for mistake in mistakes if re.search(sentence, mistake.sentence)]
    assert found.where.file == f"specs/{file}"
    if offset is not None:
        first_line = text[:at].count("\n") + 1
        assert found.where.line == first_line + offset
    assert len(mistakes) == CONSEQUENCES.get(name, 1)


# Changes that leave each other alone, in three files, and lines that are looked for with their files.
SEVERAL = (
    *("unknown key", "op of another file", "unknown name in a shape", "no arithmetic", "true or false wanted"),
    *("tolerance of no output", "no legal choice", "tile of nothing", "item twice", "undeclared feature", "no opcode"),
    *("unknown key of a row", "arch of another capability", "shared memory", "thread group"),
    *("unknown default device", "bits that do not fill the storage", "unknown format", "group without its size"),
    *("lengths", "label with a space", "number too small"),
)


def test_all_mistakes_of_all_files_are_told_at_once(specs: Path) -> None:
    """Each with the sentence that it has alone, by file, and in a file by line."""
    originals = {file: (specs / file).read_text() for file, *_ in MISTAKES.values()}
    places: dict[str, list[tuple[int, int, str]]] = {file: [] for file in originals}
    for name in SEVERAL:
        file, old, new, _, _ = MISTAKES[name]
        places[file].append((originals[file].index(old), len(old), new))
    for file, changes in places.items():
        text = originals[file]
        for at, length, new in sorted(changes, reverse=True):
            text = text[:at] + new + text[at + length :]
        (specs / file).write_text(text)
    with pytest.raises(SpecError) as caught:
        load(specs)
    found = caught.value.mistakes
    for name in SEVERAL:
        file, *_, sentence = MISTAKES[name]
        assert any(m.where.file == f"specs/{file}" and re.search(sentence, m.sentence) for m in found), (
            f"{name}\n{caught.value}"
        )
    assert str(caught.value).splitlines() == [f"{m.where}: {m.sentence}" for m in found]
    assert len(found) == sum(CONSEQUENCES.get(name, 1) for name in SEVERAL)
    files = [m.where.file for m in found]
    assert all(files.index(file) + files.count(file) - 1 == len(files) - 1 - files[::-1].index(file) for file in files)
    for file in files:
        lines = [m.where.line for m in found if m.where.file == file]
        assert lines == sorted(lines)


ROW = """
  - {dsl: cutedsl, targets: [sm99, sm90], precisions: [bf16, fp7], mma: wgmmma, copy: [tma_loda], tile: {stages: 4}}
"""


def told_at(line: int, error: SpecError) -> list[str]:
    return [each.sentence for each in error.mistakes if each.where.line == line]


@pytest.mark.parametrize("elsewhere", ["", "its file", "its row", "another file", "a target", "a precision"])
def test_whatever_a_row_names_wrongly_is_told_with_the_mistakes_of_other_places(elsewhere: str, specs: Path) -> None:
    path = specs / ATTENTION
    line = len(path.read_text().splitlines()) + 2
    path.write_text(path.read_text() + ROW)
    file, old, new = {
        "": (ATTENTION, "", ""),
        "its file": (ATTENTION, "summary:", "sumary: x\nsummary:"),
        "its row": (ATTENTION, "tile: {stages: 4}}", "tile: {stages: many}}"),
        "another file": (TOPK, "summary:", "sumary: x\nsummary:"),
        "a target": (SM90, "summary:", "sumary: x\nsummary:"),
        "a precision": (PRECISIONS, "bits: 4", "bits: some"),
    }[elsewhere]
    line += elsewhere == "its file"
    (specs / file).write_text((specs / file).read_text().replace(old, new))
    with pytest.raises(SpecError) as caught:
        load(specs)
    told = [re.sub("; .*", "", sentence) for sentence in told_at(line, caught.value)]
    of_sm90 = [] if elsewhere == "a target" else ["unknown mma 'wgmmma'", "sm90 has no copy engine 'tma_loda'"]
    values = ["kernels[2].tile.stages must be an integer, not 'many'"] if elsewhere == "its row" else []
    wanted = ["unknown target 'sm99'", "unknown precision 'fp7'", *of_sm90]
    assert sorted(re.sub(r"\[\d+\]", "[2]", sentence) for sentence in told) == sorted([*wanted, *values]), caught.value
    others = {"": 0, "its row": 0, "a precision": 2}.get(elsewhere, 1)  # two formats have 4 bits
    assert len(caught.value.mistakes) == len(told) + others, caught.value


def test_what_no_target_has_is_told_of_a_row_without_a_target_that_there_is(specs: Path) -> None:
    path = specs / ATTENTION
    line = len(path.read_text().splitlines()) + 2
    path.write_text(path.read_text() + ROW.replace("sm99, sm90", "sm99"))
    with pytest.raises(SpecError) as caught:
        load(specs)
    assert {
        "unknown target 'sm99'",
        "unknown precision 'fp7'",
        "no target has the mma 'wgmmma', 'wgmma'",
        "no target has the copy engine 'tma_loda', 'tma_load'",
    } == {re.sub("; known:[^?]*(; did you mean|$)|[?]", ",", each).strip(",") for each in told_at(line, caught.value)}


def test_the_nearest_element_is_named(specs: Path) -> None:
    path = specs / SM90
    path.write_text(path.read_text().replace("float32: 66.9}", "floot32: 66.9}"))
    with pytest.raises(SpecError, match=r"names 'floot32', which no mma .*; did you mean 'float32'\?"):
        load(specs)


def test_all_keys_that_are_missing_are_told_at_once(specs: Path) -> None:
    text = (specs / TOPK).read_text()
    for key in ("summary", "reference"):
        text = re.sub(rf"^{key}: .*\n", "", text, flags=re.MULTILINE)
    (specs / TOPK).write_text(text)
    with pytest.raises(SpecError) as caught:
        load(specs)
    assert [m.sentence for m in caught.value.mistakes] == [
        "the file lacks the key 'summary'",
        "the file lacks the key 'reference'",
    ]


def test_a_part_that_depends_on_a_mistake_is_not_told(specs: Path) -> None:
    """A dim that cannot be read is still a name in shapes, and a format that has a mistake is still known."""
    path = specs / ATTENTION
    path.write_text(path.read_text().replace("  topk: runtime", "  topk: '1 +'"))
    path = specs / PRECISIONS
    path.write_text(path.read_text().replace("bits: 16", "bits: some"))
    with pytest.raises(SpecError) as caught:
        load(specs)
    assert [m.where.file for m in caught.value.mistakes] == [f"specs/{PRECISIONS}", f"specs/{ATTENTION}"]


def test_default_that_nobody_uses(specs: Path) -> None:
    path = specs / "operators" / "combine.yaml"
    lines = path.read_text().splitlines(keepends=True)
    lines = [line.replace("label:", "num_splits: 2, label:") if "- {label:" in line else line for line in lines]
    path.write_text("".join(lines).replace("num_splits: 1}", "}").replace(", }", "}"))
    with pytest.raises(SpecError, match="default 'num_splits' is overridden by every workload") as caught:
        load(specs)
    assert "defaults:" in lines[caught.value.where.line - 1]


def test_values_that_would_never_run(specs: Path) -> None:
    path = specs / "operators" / "combine.yaml"
    path.write_text(path.read_text().replace(", points: ci", ""))
    with pytest.raises(SpecError, match="no verify workload has `points: ci`"):
        load(specs)


def test_empty_file(specs: Path) -> None:
    (specs / PRECISIONS).write_text("# nothing\n")
    with pytest.raises(SpecError, match=r"^specs/precisions.yaml:1: the file is empty"):
        load(specs)


def test_bytes_that_are_no_text(specs: Path) -> None:
    (specs / PRECISIONS).write_bytes(b"bf16: \xff")
    with pytest.raises(SpecError, match=r"^specs/precisions.yaml:1: is not UTF-8 text"):
        load(specs)


def test_a_key_that_is_no_text(specs: Path) -> None:
    (specs / PRECISIONS).write_text("\n8: {}\n")
    with pytest.raises(SpecError, match=r"^specs/precisions.yaml:2: a key of the file must be text, not 8"):
        load(specs)


def test_missing_file(specs: Path) -> None:
    (specs / PRECISIONS).unlink()
    with pytest.raises(SpecError, match=r"^specs/precisions.yaml:1: cannot be read"):
        load(specs)


def test_links_in_a_circle(specs: Path) -> None:
    (specs / PRECISIONS).unlink()
    (specs / PRECISIONS).symlink_to(specs / PRECISIONS)
    with pytest.raises(SpecError, match=r"^\S*specs/precisions.yaml:1: cannot be read: Too many levels of symbolic"):
        load(specs)


def test_a_file_beyond_measure(specs: Path) -> None:
    (specs / PRECISIONS).write_text("#" * (1 << 20) + "\nformats: {}\n")
    with pytest.raises(SpecError, match=r"^specs/precisions.yaml:1: the file has \d+ characters, wanted at most"):
        load(specs)


@pytest.mark.parametrize(
    ("roofline", "sentence"),
    [
        ("1e308 * 10", "'1e308 \\* 10' is too large for a number"),
        ("total_q / (topk - topk)", "divides by zero"),
    ],
)
def test_a_roofline_without_a_value(roofline: str, sentence: str, specs: Path) -> None:
    path = specs / TOPK
    text = path.read_text()
    at = text.index("  flops: ")
    path.write_text(text[:at] + f"  flops: {roofline}\n" + text[text.index("\n", at) + 1 :])
    with pytest.raises(SpecError, match=rf"^specs/{TOPK}:\d+: workload \w+: .*{sentence}"):
        load(specs)


@pytest.mark.parametrize(
    ("value", "sentence"), [("384.7", "is 384.7, wanted a whole number"), ("-128", "is -128, wanted")]
)
def test_threads_are_whole_numbers(value: str, sentence: str, specs: Path) -> None:
    from msa_tiles.codegen.plan import plans

    path = specs / "operators/combine.yaml"
    text = path.read_text()
    threads = re.search(r"threads: .*", text)
    assert threads
    path.write_text(text.replace(threads[0], f"threads: '{value}'"))
    with pytest.raises(SpecError, match=rf"^specs/operators/combine.yaml:\d+: combine\.[^:]+: .*{sentence}"):
        plans(load(specs))


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=rf"{tmp_path}/targets: there is no such directory of specs"):
        load(tmp_path)


# What no value of a spec is, of many kinds.
NASTY = (
    *("min(1)", "1e308*10", "0", "-1", "384.7", "1.0e+400", ".inf", "null", "true", "[]", "{}", "''", "'a b'", "../x"),
    *("__x__", "class", "9" * 20, "a/b", "1/0", "x.y", "'\"'", '"\\u2028"', "0x10", "!!python/object:os.system x"),
    *("{a: 1}", "[1, 2]", "[[1]]", "2**9", "topk", "head_dim / 3", "head_dim - 1000", "<<", "=", "2026-11-29", "1:30"),
    *("q16kv8", "{{x}}", "5e-324", "-0.0", "not 1", "1 if 0 else 2", "0 // 0", "(1", "9" * 300, "*a", "&a 1", "? 1"),
)
DRAWS = examples(40)


def test_whatever_stands_in_a_spec_is_a_mistake_or_serves(specs: Path) -> None:
    """Drawn values in drawn places: nothing but SpecError comes out."""
    draw = random.Random(int(os.environ["MSA_TILES_SEED"]))
    files = sorted(specs.rglob("*.yaml"))
    refused = 0
    for _ in range(DRAWS):
        path, value = draw.choice(files), draw.choice(NASTY)
        text = path.read_text()
        place = draw.choice(list(re.finditer(r"(?<=[:\[,] )[^\s,\]\}\{\[#][^,\]\}\n]*", text)))
        path.write_text(text[: place.start()] + value + text[place.end() :])
        try:
            load(specs)
        except SpecError as error:
            refused += 1
            assert error.where.file.endswith(".yaml") and error.where.line >= 1
        except BaseException as error:
            raise AssertionError(f"{path.name}: {place[0]!r} -> {value!r}") from error
        path.write_text(text)
    assert refused
