"""What a run of the tests draws, it draws from one seed, and nothing of an earlier run comes back."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import core
from hypothesis import strategies as st


def test_hypothesis_keeps_nothing_and_takes_the_seed_of_the_run(request: pytest.FixtureRequest) -> None:
    assert hypothesis.settings.default is not None and hypothesis.settings.default.database is None
    assert core.global_force_seed == int(request.config.getoption("--hypothesis-seed"))


def test_a_seed_draws_the_same_examples() -> None:
    drawn: list[list[int]] = [[], []]

    def draw(seen: list[int]) -> None:
        @hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate])
        @hypothesis.given(number=st.integers(0, 1 << 30))
        def examples(number: int) -> None:
            seen.append(number)

        examples()

    for seen in drawn:
        draw(seen)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 5
