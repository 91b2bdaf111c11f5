"""Renders a skeleton into the source of one kernel.

A skeleton is valid Python with these kinds of marks:

- jinja2 statements on lines of their own, `# % if plan.mma == "wgmma"` … `# % endif`;
- conditional lines, `from … import scaled  # % if precision.scale`: there on that condition, without the mark;
- value lines, `STAGES = 4  # <- tile.stages`: the literal is replaced by the value of the path, the mark is dropped;
- operands, `from ….operands import plain as key_value  # <- operands.key_value`: the module is the one that the row
  takes for this role, and `k: cute.Tensor,  # <- tensors of operands.key_value` is written once for each tensor that a
  call passes for it (`k`, `k_scale`);
- `# <- cta`, a line of a docstring: what the file's function `cta` says of the thread block;
- `# <- Left of operands.key_value`, a paragraph of a docstring: what that of an operand's class says behind its first
  paragraph, if anything.

All see `plan`, `tile`, `operands`, `declared`, `target`, `precision` and `operator`. `declared.key_value` are the
constants that the operand's module declares, by name: `# % if declared.key_value.get("SCORES")`.
"""

from __future__ import annotations

import ast
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from msa_tiles.codegen.facts import Noted, unfollowed
from msa_tiles.codegen.marks import no_module, no_value, sizes_of, unread
from msa_tiles.codegen.plan import CellError, KernelPlan
from msa_tiles.names import meant
from msa_tiles.origins import line_in
from msa_tiles.sources import OPERANDS, PACKAGE, operand_file, parsed
from msa_tiles.spec import Location, Mistakes, Operator, Precision, SpecError, Target
from msa_tiles.spec.source import shown
from msa_tiles.syntax import SourceError, expression_of, line_of, text_of
from msa_tiles.tables import Table, TableError, constants_of, describe, docstring_of, place_of, table_of

SKELETONS = Path(__file__).parent / "skeletons"

_STATEMENT = re.compile(r"\s*# % (?P<statement>.*?):?\s*")
_CONDITIONAL_LINE = re.compile(r"(?P<code>.*\S)  # % (?P<condition>if .*)")
_MARK = "# <-"
_VALUE_LINE = re.compile(r"(?P<name>\s*[A-Za-z_]\w*(?:\s*:[^=]+)?\s*=\s*)(?P<literal>\S.*?)\s*# <- (?P<path>[\w.]+)")
_ALMOST_A_MARK = re.compile(r"#\s*%\s*[a-z]+\b|#(?:|\s{2,})<-|# <-\w")
_OPERAND_LINE = re.compile(
    r"(?P<before>from (?P<package>[\w.]+) import )\w+(?P<after> as \w+)\s*# <- operands\.(?P<role>\w+)"
)
_TENSOR_LINE = re.compile(r"(?P<before>\s*)(?P<name>\w+)(?P<after>(?::.*)?,)\s*# <- tensors of operands\.(?P<role>\w+)")
_CTA_LINE = re.compile(r"(?P<indent> *)# <- cta\n")
_CLASS_LINE = re.compile(r"(?P<indent> *)# <- (?P<name>[A-Z]\w*) of operands\.(?P<role>\w+)\n")
_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of an expression with other values
_CLASS_PARAGRAPH = re.compile(f"\n{_CLASS_LINE.pattern}")  # with the blank line before it


class _RowError(jinja2.UndefinedError):
    """A line statement asks for what a plan may have and this one has not."""


class _Undefined(jinja2.StrictUndefined):
    """What a row decides, and whether it decides it, is the row's; other names are the skeleton's."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = jinja2.utils.missing,
        name: str | None = None,
        exc: type[jinja2.TemplateRuntimeError] = jinja2.UndefinedError,
    ) -> None:
        if obj is None or isinstance(obj, Mapping):
            hint, exc = f"{name!r} is unknown", _RowError
        elif obj is not jinja2.utils.missing and isinstance(name, str):
            hint = f"{type(obj).__name__} has no attribute {name!r}{meant(name, _public(obj))}"
        super().__init__(hint, obj, name, exc)


def _public(value: object) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


# Jinja's own delimiters are legal Python ("{{" in an f-string): use characters that source never holds.
_ENVIRONMENT = jinja2.Environment(
    block_start_string="\x01%",
    block_end_string="%\x01",
    variable_start_string="\x01(",
    variable_end_string=")\x01",
    comment_start_string="\x01#",
    comment_end_string="#\x01",
    keep_trailing_newline=True,
    trim_blocks=True,
    undefined=_Undefined,
    autoescape=False,
)


def render(
    plan: KernelPlan,
    operator: Operator,
    target: Target,
    precision: Precision,
    skeletons: Sequence[Path] = (SKELETONS,),
    package: Path = PACKAGE,
) -> str:
    """The kernel's source, without a header, from the first directory of skeletons that has one for it.

    Raises SpecError with all mistakes of the skeleton, at its lines, and of the row, at that of the row: what the
    skeleton reads and the row has not, and what it cannot take of the row.
    """
    path = next((path for folder in skeletons if (path := folder / plan.skeleton).is_file()), None)
    if path is None:
        places = " or ".join(shown(folder / plan.skeleton) for folder in skeletons)
        raise CellError(plan, f"there is no skeleton at {places}{_algorithms(plan, skeletons)}")
    file, skeleton = shown(path), text_of(path)
    text = _rendered(plan, operator, target, precision, skeleton, file, package)
    text = _CLASS_PARAGRAPH.sub(lambda mark: _class_words(mark, plan, package, file), text)
    _check_module(text, plan, file, skeleton)
    return _CTA_LINE.sub(lambda mark: _told(text, plan, package, mark["indent"], file, skeleton), text)


def _rendered(
    plan: KernelPlan,
    operator: Operator,
    target: Target,
    precision: Precision,
    skeleton: str,
    file: str,
    package: Path,
) -> str:
    """The skeleton's text with all marks replaced but those of docstrings."""
    tile, noted = _Tile(plan), Noted(precision)
    scope = {
        "plan": plan,
        "tile": tile,
        "operands": plan.operands,
        "declared": _Declared(plan, package),
        "target": target,
        "precision": noted,
        "operator": operator,
    }
    source = _marked(skeleton, file)
    with Mistakes() as mistakes:
        # What stands in for a mistake is text that nobody sees.
        def value(dotted: str, line: int) -> str:
            return mistakes.read(_value, dotted, scope, plan, Location(file, line)) or "None"

        def operand(role: str, line: int) -> str:
            found = mistakes.read(_operand, role, plan, package, Location(file, line))
            return found.stem if found else "none"

        def tensors(role: str, line: int) -> tuple[str, ...]:
            return mistakes.read(_tensors, role, plan, package, Location(file, line)) or ("",)

        try:
            text = _template(source).render(**scope, _value=value, _operand=operand, _tensors=tensors)
        except jinja2.TemplateSyntaxError as error:
            raise _of_template(error, skeleton, file) from error
        except (SpecError, SourceError):
            raise
        except (_RowError, *_FAILURES) as error:
            raise _refused(plan, f"line statement: {error}", Location(file, _template_line(error))) from error
        except jinja2.TemplateError as error:
            raise SpecError(Location(file, _template_line(error)), f"line statement: {error.message}") from error
        if not mistakes.found:
            named = sizes_of(skeleton)
            formulas = frozenset[str]().union(
                *(each.names for each in (plan.threads_formula, plan.shared_memory_formula) if each is not None)
            )
            unfollowed_by = [
                unread(name, file, named, plan.tile)
                for name in plan.tile
                if name not in tile.read and name not in formulas
            ]
            unfollowed_by += unfollowed(plan, precision, noted.tells_multiply, text, file, package)
            if unfollowed_by:
                _check_module(text, plan, file, skeleton)  # of what is no kernel nothing else is told
            for why in unfollowed_by:
                mistakes.add(CellError(plan, why))
    return text


def _of_template(error: jinja2.TemplateSyntaxError, skeleton: str, file: str) -> SpecError:
    """What jinja cannot read, at its line; of a block that nothing closes that is the one which opens it."""
    line, sentence = error.lineno, error.message or ""
    opened: list[tuple[int, str]] = []
    for number, each in enumerate(skeleton.splitlines(), start=1):
        word = statement["statement"].split(" ")[0] if (statement := _STATEMENT.fullmatch(each)) else ""
        if word in ("if", "for"):
            opened.append((number, word))
        elif word in ("endif", "endfor") and opened:
            opened.pop()
    if sentence.startswith("Unexpected end of template") and opened:
        line, word = opened[-1]
        sentence = f"nothing closes this `{word}`: `# % end{word}` is missing"
    return SpecError(Location(file, line), f"line statement: {sentence}")


def _algorithms(plan: KernelPlan, skeletons: Sequence[Path]) -> str:
    """Says which algorithms a row may name that names one without a skeleton; empty for a row that names none."""
    if not plan.algorithm:
        return ""
    place = Path(plan.skeleton).parent
    # Another operator's name may begin with this one's: a skeleton has a function of its operator's name.
    entry = re.compile(rf"^\s*def {plan.op}\(", re.MULTILINE)
    files = (path for folder in skeletons for path in sorted((folder / place).glob(f"{plan.op}*.py")))
    known = {path.stem for path in files if entry.search(path.read_text(encoding="utf-8", errors="replace"))}
    named = sorted(stem.removeprefix(f"{plan.op}_") for stem in known - {plan.op})
    told = [f"algorithm: {name}" for name in named] + ["no algorithm"] * (plan.op in known)
    return f"; rows of {plan.op} for {place} have {' or '.join(told) or 'none as yet'}{meant(plan.algorithm, named)}"


def _refused(plan: KernelPlan, sentence: str, where: Location) -> CellError:
    """A mistake of a row, at its line, that shows at a line of its skeleton."""
    return CellError(plan, f"{sentence} ({where})")


def _class_words(mark: re.Match[str], plan: KernelPlan, package: Path, file: str) -> str:
    """What the docstring of an operand's class says behind its first paragraph, with a blank line before it."""
    words = docstring_of(_operand(mark["role"], plan, package, Location(file, 1)), mark["name"], package)
    _, _, more = (words or "").partition("\n\n")
    return "".join(f"{mark['indent']}{line}\n" if line else "\n" for line in ("", *more.splitlines())) if more else ""


def _told(text: str, plan: KernelPlan, package: Path, indent: str, file: str, skeleton: str) -> str:
    """What the tables of all variants say, as lines of a docstring."""
    table = None
    try:
        table = table_of(text, package)
        if table is None:
            raise SpecError(Location(file, 1), "`# <- cta` stands in a skeleton without a function cta")
        lines = _described(table, tuple(tuple(variant.items()) for variant in plan.points()))
    except TableError as error:
        of, line = place_of(error, text)
        where = Location(file, line_in(skeleton, text, line) or 1) if of is None else Location(shown(of), line)
        if table is None or isinstance(error.__cause__, NameError | AttributeError):  # which no row brings about
            raise SpecError(where, str(error)) from error
        raise _refused(plan, str(error), where) from error
    return "".join(f"{indent}{line}\n" if line else "\n" for line in lines)


@functools.lru_cache(maxsize=256)
def _described(table: Callable[..., Table], variants: tuple[tuple[tuple[str, int], ...], ...]) -> tuple[str, ...]:
    return tuple(describe([table(**dict(variant)) for variant in variants]))


def _operand(role: str, plan: KernelPlan, package: Path, where: Location) -> Path:
    """The file of the module that a plan takes for a role."""
    if role not in plan.operands:
        raise _refused(plan, f"there is no operand {role!r}, but {', '.join(plan.operands) or 'none'}", where)
    module, name = f"msa_tiles.dsl.{plan.dsl}{OPERANDS}", plan.operands[role]
    path = operand_file(name, module, package)
    if path is None:
        # The lines that ask for it have no part in this.
        raise CellError(plan, no_module(role, name, module))
    return path


def _tensors(role: str, plan: KernelPlan, package: Path, where: Location) -> tuple[str, ...]:
    """The endings of the names of the tensors that an operand takes."""
    path = _operand(role, plan, package, where)
    endings = constants_of(path, package).get("TENSORS")
    if not isinstance(endings, tuple) or not endings or not all(isinstance(ending, str) for ending in endings):
        raise SpecError(Location(shown(path), 1), "the operand does not say its TENSORS, a tuple of endings")
    return endings


@functools.lru_cache(maxsize=256)
def _template(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)


class _Tile(Mapping[str, int]):
    """The plan's tile sizes; remembers which of them the skeleton read."""

    def __init__(self, plan: KernelPlan) -> None:
        self._sizes = plan.tile
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.read.add(name)
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


class _Declared(Mapping[str, Mapping[str, Any]]):
    """Of each role, the constants that its operand's module declares."""

    def __init__(self, plan: KernelPlan, package: Path) -> None:
        self._plan, self._package = plan, package

    def __getitem__(self, role: str) -> Mapping[str, Any]:
        return constants_of(_operand(role, self._plan, self._package, self._plan.where), self._package)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.operands)

    def __len__(self) -> int:
        return len(self._plan.operands)


@functools.lru_cache(maxsize=128)
def _marked(source: str, file: str) -> str:
    """A skeleton in jinja's own words. Raises SpecError with all marks that are none."""
    with Mistakes() as mistakes:
        return "".join(_marked_lines(source, file, mistakes))


def _marked_lines(source: str, file: str, mistakes: Mistakes) -> Iterator[str]:
    """Turn all marks into jinja's own, line for line. `mistakes` hears of marks that are none.

    Line statements become blocks here, because jinja's line statements swallow the blank lines that follow them. Value
    lines become expressions that know their line, so that a branch not taken asks for nothing.
    """
    for number, line in enumerate(source.splitlines(keepends=True), start=1):
        if statement := _STATEMENT.fullmatch(line.rstrip("\n")):
            yield f"\x01% {statement['statement']} %\x01\n"
        elif conditional := _CONDITIONAL_LINE.fullmatch(line.rstrip("\n")):
            marked = mistakes.read(_marked_line, conditional["code"] + "\n", number, file)
            # The plus keeps the newline that jinja would take away where a blank line follows.
            yield f"\x01% {conditional['condition']} %\x01{marked}\x01% endif +%\x01"
        elif _ALMOST_A_MARK.search(line):
            sentence = "no mark: `# % if …`, `# % else`, `# % endif` and the like have a line of their own, `# % if …` "
            mistakes.add(SpecError(Location(file, number), f"{sentence}also ends one, and a value is `# <- path`"))
        else:
            yield mistakes.read(_marked_line, line, number, file) or ""


def _marked_line(line: str, number: int, file: str) -> str:
    if _MARK not in line or _CTA_LINE.fullmatch(line) or _CLASS_LINE.fullmatch(line):
        return line
    if operand := _OPERAND_LINE.fullmatch(line.rstrip("\n")):
        return f'{operand["before"]}\x01( _operand("{operand["role"]}", {number}) )\x01{operand["after"]}\n'
    if tensors := _TENSOR_LINE.fullmatch(line.rstrip("\n")):
        each = f"{tensors['before']}{tensors['name']}\x01( _ending )\x01{tensors['after']}\n"
        return f'\x01% for _ending in _tensors("{tensors["role"]}", {number}) %\x01{each}\x01% endfor +%\x01'
    match = _VALUE_LINE.fullmatch(line.rstrip("\n"))
    if match is None or not _is_literal(match["literal"]):
        raise SpecError(Location(file, number), "a value line must read `NAME = literal  # <- path`")
    return f'{match["name"]}\x01( _value("{match["path"]}", {number}) )\x01\n'


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(expression_of(text))
    except (ValueError, SyntaxError):
        return False
    return True


def _value(dotted: str, scope: Mapping[str, Any], plan: KernelPlan, where: Location) -> str:
    value: Any = scope
    for position, part in enumerate(dotted.split(".")):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif not part.startswith("_") and hasattr(value, part) and position > 0 and not isinstance(value, Mapping):
            value = getattr(value, part)
        else:
            sentence = no_value(dotted, part)
            its_row = position > 0 and (value is None or isinstance(value, Mapping))
            raise _refused(plan, sentence, where) if its_row else SpecError(where, sentence)
    literal = _literal(value)
    if literal is None:
        raise SpecError(where, f"{dotted!r} is a {type(value).__name__}, which has no literal")
    return literal


def _literal(value: Any) -> str | None:
    """Python source of a value, written as the formatter would write it."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if '"' in value else '"' + repr(value)[1:-1].replace("\\'", "'") + '"'
    if isinstance(value, tuple | list):
        items = [_literal(item) for item in value]
        if None in items:
            return None
        return "(" + ", ".join(map(str, items)) + ("," if len(items) == 1 else "") + ")"
    if isinstance(value, Mapping):
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    return None


def _template_line(error: Exception) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return lines[-1] or 1 if lines else 1


class _Outline(NamedTuple):
    """What a kernel's contract asks of a module."""

    has_docstring: bool
    functions: Mapping[str, tuple[str, ...]]  # their arguments


@functools.lru_cache(maxsize=256)
def _outline(text: str) -> _Outline:
    """Raises SyntaxError."""
    module = parsed(text)
    functions = {
        node.name: tuple(each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        for node in module.body
        if isinstance(node, ast.FunctionDef)
    }
    return _Outline(bool(ast.get_docstring(module)), functions)


def _check_module(text: str, plan: KernelPlan, file: str, skeleton: str) -> None:
    """The kernel module keeps its contract: a function named like the operator, one keyword for each variant dim."""
    if not skeleton.strip():
        raise SpecError(Location(file, 1), "the skeleton is empty")
    try:
        has_docstring, functions = _outline(text)
    except SyntaxError as error:
        line = line_in(skeleton, text, line_of(error, text)) or 1
        raise SpecError(Location(file, line), f"the skeleton renders to invalid Python: {error.msg}") from error
    if not has_docstring:
        raise SpecError(Location(file, 1), "the skeleton has no module docstring")
    if plan.op not in functions:
        raise SpecError(Location(file, 1), f"the skeleton defines no top-level function {plan.op}")
    arguments = functions[plan.op]
    if sorted(arguments) != sorted(plan.variants):
        wanted = ", ".join(plan.variants) or "nothing"
        sentence = f"{plan.op} takes {', '.join(arguments)}; it must take {wanted}"
        raise _refused(plan, sentence, Location(file, 1))
