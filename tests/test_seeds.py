"""What a run of the tests draws, it draws from one seed, and nothing of an earlier run comes back."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import hypothesis
import pytest
import torch
from hypothesis import core
from hypothesis import strategies as st
from seeds import MANY_SEEDS, QUICK, SHARE, examples, numbers_of, seed_all

# Each test writes what it drew beside its name; `rare` fails for one seed of ten.
DRAWING = """
import random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from seeds import examples


def drew(name, value):
    with open("drawn", "a") as file:
        file.write(f"{name} {value}\\n")


@pytest.fixture(scope="module")
def shared():
    return torch.randn((), generator=torch.Generator().manual_seed(1)).item()


def test_of_nothing(shared):
    drew("nothing", shared)


def test_of_a_fixture(shared, tmp_path):
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").touch()
    drew("shared", f"{shared} {random.Random(1).random()}")


def test_of_torch():
    drew("torch", torch.randn((), generator=torch.Generator("cpu").manual_seed(0)).item())
    drew("share", examples(40))


def test_of_numpy():
    drew("numpy", np.random.default_rng(0).random())


def test_of_no_generator():
    drew("none", torch.randn(()).item())


@given(number=st.integers(0, 1 << 30))
def test_of_hypothesis(number):
    drew("hypothesis", number)


def test_rare():
    value = random.Random(0).random()
    drew("rare", value)
    assert not 0 <= value - 0.5 < 0.1


@pytest.mark.planted
def test_of_a_fault():
    drew("fault", random.Random(0).random())


@pytest.mark.skip
def test_left_out():
    pass
"""


def test_hypothesis_keeps_nothing_and_takes_the_seed_of_the_run(request: pytest.FixtureRequest) -> None:
    assert hypothesis.settings.default is not None and hypothesis.settings.default.database is None
    assert core.global_force_seed == int(request.config.getoption("--hypothesis-seed"))


def test_a_seed_draws_the_same_examples() -> None:
    drawn: list[list[int]] = [[], []]

    def draw(seen: list[int]) -> None:
        @hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate])
        @hypothesis.given(number=st.integers(0, 1 << 30))
        def drawing(number: int) -> None:
            seen.append(number)

        drawing()

    for seen in drawn:
        draw(seen)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 5


def test_draws_become_fewer_where_a_test_runs_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    assert examples(150) == 150
    for share, count in ((QUICK, 50), (MANY_SEEDS, 8)):
        monkeypatch.setenv(SHARE, str(share))
        assert (examples(150), examples(1)) == (count, 1)


def test_the_runs_that_an_option_names() -> None:
    assert (numbers_of("200"), numbers_of("7-7"), numbers_of("3-5")) == (range(200), range(7, 8), range(3, 6))


def test_what_has_no_generator_is_seeded_by_the_run_and_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seed: str, test: str) -> tuple[float, float]:
        monkeypatch.setenv("MSA_TILES_SEED", seed)
        seed_all(test)
        return torch.randn(()).item(), random.random()

    assert drawn("1", "a") == drawn("1", "a")
    assert len({drawn(seed, test) for seed in "12" for test in "ab"}) == 4


def test_gpus_are_seeded_by_the_run_and_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    for seed, test in ("1a", "1a", "1b", "2a"):
        monkeypatch.setenv("MSA_TILES_SEED", seed)
        seed_all(test, on_gpu=True)
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3
    seed_all("a")
    assert len(seeds) == 4


def test_no_test_draws_what_cannot_be_repeated() -> None:
    """A seed that the machine draws is of one run: what fails under it is never seen again."""
    words = ("torch.seed" + "(", "System" + "Random", "os.uran" + "dom")
    files = list(Path(__file__).parent.rglob("*.py"))
    assert len(files) > 200
    assert [(file.name, word) for file in files for word in words if word in file.read_text(encoding="utf-8")] == []


@pytest.mark.slow
def test_tests_that_draw_run_under_so_many_seeds(tmp_path: Path) -> None:
    (tmp_path / "test_drawing.py").write_text(DRAWING)

    def run(*options: str) -> tuple[str, dict[str, list[str]]]:
        (tmp_path / "drawn").write_text("")
        command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-q", *options]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120)
        found: dict[str, list[str]] = {}
        for line in (tmp_path / "drawn").read_text().splitlines():
            name, _, value = line.partition(" ")
            found.setdefault(name, []).append(value)
        return done.stdout, found

    out, found = run("--seeds", "60", "--junit-xml", "told.xml")
    assert "1 failed, 7 passed, 1 skipped" in out, out
    assert len(found["nothing"]) == len(found["fault"]) == 1, "a test that draws nothing runs once"
    for name in ("shared", "torch", "numpy", "none"):
        assert len(set(found[name])) == len(found[name]) == 60, name
    assert len({value.split()[0] for value in found["shared"]}) == 1, "a fixture of the module is drawn once"
    assert len(set(found["hypothesis"])) > 1000
    assert set(found["share"]) == {str(40 // MANY_SEEDS)}
    told = {
        case.attrib["name"].removeprefix("test_"): each.attrib["value"]
        for case in ElementTree.parse(tmp_path / "told.xml").iter("testcase")
        for each in case.iter("property")
    }
    [(number, place)] = re.findall(r"run (\d+) of 0 to 59; again: (.*)", out)
    assert len(found["rare"]) == int(number) + 1, "it stops where it fails"
    assert (told["of_nothing"], told["of_torch"], told["rare"]) == ("0", "60", str(int(number) + 1))
    # The run that failed, alone and in another process.
    assert re.fullmatch(rf"MSA_TILES_SEED={os.environ['MSA_TILES_SEED']} pytest --seeds {number}-{number} '.*'", place)
    out, again = run("--seeds", f"{number}-{number}")
    assert "1 failed, 7 passed, 1 skipped" in out, out
    assert {name: values[-1] for name, values in again.items()}["rare"] == found["rare"][-1]
    for name in ("shared", "torch", "numpy", "none"):
        assert again[name] == [found[name][int(number)]], name
    _, plain = run()
    assert {plain[name][0] for name in ("torch", "none")} == {found[name][0] for name in ("torch", "none")}
