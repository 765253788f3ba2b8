"""The scheduler: nobody overtakes, nobody starves, budgets hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.engine.scheduler import EngineConfig, Running, Schedule, admit, schedule
from looseleaf.errors import ConfigError


def config(max_rows: int = 10, **more: int) -> EngineConfig:
    return EngineConfig(max_rows=max_rows, **more)


def running(*rows_left: int, whole: tuple[int, ...] = ()) -> list[Running]:
    """Sequences 0, 1, … with these rows left; those in `whole` must be computed in one pass."""
    return [Running(id=at, rows_left=left, splittable=at not in whole) for at, left in enumerate(rows_left)]


@pytest.mark.parametrize("name", ["max_rows", "max_running", "max_waiting", "kv_budget_bytes"])
@pytest.mark.parametrize("value", [0, -1])
def test_budgets_are_positive(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"engine.{name} must be >= 1, got {value}"):
        EngineConfig(**{name: value})


def test_nothing_to_run_is_an_empty_schedule() -> None:
    assert schedule([], config()) == Schedule(decode=(), prefill=())


def test_decoding_comes_first_and_prompts_get_the_rest_in_order() -> None:
    assert schedule(running(0, 5, 0, 20), config(10)) == Schedule(decode=(0, 2), prefill=((1, 5), (3, 3)))


def test_a_long_prompt_comes_in_pieces() -> None:
    assert schedule(running(100), config(10)).prefill == ((0, 10),)
    assert schedule(running(10), config(10)).prefill == ((0, 10),)


def test_later_prompts_wait_when_the_budget_is_gone() -> None:
    assert schedule(running(10, 5), config(10)).prefill == ((0, 10),)
    assert schedule(running(11, 5), config(10)).prefill == ((0, 10),)
    assert schedule(running(9, 5), config(10)).prefill == ((0, 9), (1, 1))


def test_a_prompt_is_not_starved_by_sequences_that_decode() -> None:
    made = schedule(running(*[0] * 10, 7), config(10))
    assert len(made.decode) == 9
    assert made.prefill == ((10, 1),)


def test_what_cannot_be_split_is_computed_at_once_even_over_budget() -> None:
    assert schedule(running(50, whole=(0,)), config(10)).prefill == ((0, 50),)
    assert schedule(running(0, 50, whole=(1,)), config(10)).prefill == ((1, 50),)


def test_what_cannot_be_split_waits_for_those_before_it_and_holds_those_behind() -> None:
    assert schedule(running(4, 50, 3, whole=(1,)), config(10)).prefill == ((0, 4),)
    assert schedule(running(4, 6, 3, whole=(1,)), config(10)).prefill == ((0, 4), (1, 6))
    assert schedule(running(50, 3, whole=(0,)), config(10)).prefill == ((0, 50),)


@pytest.mark.parametrize("rows_left", [[0, 0, 0], [0, 0, 5]])
def test_no_pass_has_more_rows_than_its_budget(rows_left: list[int]) -> None:
    made = schedule(running(*rows_left), config(2))
    assert len(made.decode) + sum(rows for _, rows in made.prefill) <= 2


RUNNING = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12).map(
    lambda rows: [Running(id=at, rows_left=left, splittable=split) for at, (left, split) in enumerate(rows)]
)


@settings(max_examples=300, deadline=None)
@given(RUNNING, st.integers(1, 40))
def test_every_schedule_keeps_the_rules(batch: list[Running], max_rows: int) -> None:
    made = schedule(batch, config(max_rows))
    by_id = {one.id: one for one in batch}
    decoding = [one.id for one in batch if one.rows_left == 0]
    assert list(made.decode) == decoding[: len(made.decode)], "those that decode are taken in order"
    assert len(made.decode) >= min(len(decoding), max_rows - 1)
    order = [number for number, _ in made.prefill]
    prompts = [one.id for one in batch if one.rows_left]
    assert order == prompts[: len(order)], "prompts are taken in order, none is skipped"
    assert bool(order) == bool(prompts), "somebody always gets on"
    for number, rows in made.prefill:
        assert 1 <= rows <= by_id[number].rows_left
        assert by_id[number].splittable or rows == by_id[number].rows_left
    total = len(made.decode) + sum(rows for _, rows in made.prefill)
    alone = len(order) == 1
    assert total <= max_rows or alone or not order


@settings(max_examples=100, deadline=None)
@given(RUNNING, st.integers(1, 12), st.integers(1, 5))
def test_every_prompt_is_done_in_the_end(batch: list[Running], max_rows: int, answers: int) -> None:
    left = {one.id: one.rows_left for one in batch}
    to_say = {one.id: answers for one in batch}
    split = {one.id: one.splittable for one in batch}
    work = sum(left.values()) + answers * len(batch)
    for _ in range(work + 1):
        made = schedule([Running(id=n, rows_left=left[n], splittable=split[n]) for n in to_say], config(max_rows))
        if not made.decode and not made.prefill:
            break
        for number in made.decode:
            to_say[number] -= 1
        for number, rows in made.prefill:
            left[number] -= rows
        to_say = {number: count for number, count in to_say.items() if count}
    assert not to_say


def test_requests_are_admitted_while_their_bytes_fit() -> None:
    budget = config(kv_budget_bytes=100, max_running=3)
    assert admit([], 0, 0, budget) == 0
    assert admit([50, 50, 1], 0, 0, budget) == 2
    assert admit([100], 0, 0, budget) == 1
    assert admit([101], 0, 0, budget) == 0
    assert admit([50], 1, 51, budget) == 0
    assert admit([1, 1, 1, 1], 0, 0, budget) == 3
    assert admit([1], 3, 3, budget) == 0


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    assert admit([80, 1, 1], 1, 50, config(kv_budget_bytes=100)) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=10), st.integers(0, 6), st.integers(0, 120), st.integers(1, 100),
    st.integers(1, 6),
)  # fmt: skip
def test_admission_is_the_longest_run_from_the_front_that_fits(
    sizes: list[int], count: int, used: int, budget: int, most: int
) -> None:
    limits = config(kv_budget_bytes=budget, max_running=most)
    admitted = admit(sizes, count, used, limits)
    if admitted:
        assert used + sum(sizes[:admitted]) <= budget
        assert count + admitted <= most
    if admitted < len(sizes):
        assert used + sum(sizes[: admitted + 1]) > budget or count + admitted >= most
