import random

import numpy as np
import pytest
import torch

from qurl.rollout.engine import Asked
from qurl.rollout.local.cache import SCRATCH_PAGE, PagePool
from qurl.rollout.local.requests import Group, LengthHistory, Request, Transcript
from qurl.rollout.local.scheduler import Scheduler
from qurl.types import Problem

PAGE = 4


def make_group(name: str, prompt_length: int, size: int, max_tokens: int = 1000) -> list[Request]:
    problem = Problem(name, tuple(range(prompt_length)))
    group = Group(problem, [None] * size, num_unadmitted=size)
    transcript = Transcript(max_tokens)
    return [Request(i, group, i, i, transcript) for i in transcript.open(size, ())]


def make_request(name: str, prompt_length: int, max_tokens: int = 1000) -> Request:
    return make_group(name, prompt_length, 1, max_tokens)[0]


def make_scheduler(
    *groups: list[Request], pages: int, max_batch: int = 100, lookahead: int = 0, **options
) -> Scheduler:
    scheduler = Scheduler(PagePool(pages, PAGE), max_batch, lookahead=lookahead, **options)
    scheduler.add([request for group in groups for request in group])
    return scheduler


def sample(request: Request, count: int = 1) -> None:
    """Let a token 0 (or some) have been read."""
    for _ in range(count):
        one = np.array([0])
        request.transcript.append(np.array([request.index]), one, one, 0)


def step(scheduler: Scheduler) -> list[Request]:
    """Admit, reserve, launch and read one step; returns who took part, in order of admission."""
    scheduler.admit()
    assert scheduler.reserve()
    scheduler.compact()
    check(scheduler)
    running = sorted(scheduler.running, key=lambda r: r.serial)
    scheduler.advance()
    for request in running:
        sample(request)
    return running


def check(scheduler: Scheduler) -> None:
    """What holds before every launch."""
    assert scheduler.num_rows == scheduler.num_running <= scheduler.max_batch
    for row, request in enumerate(scheduler.running):
        assert request.row == row
        assert scheduler.indices[row] == request.index
        assert scheduler.lengths[row] == request.num_tokens <= len(request.pages) * PAGE
        assert scheduler.table[row, : len(request.pages)].tolist() == request.pages
        assert (scheduler.table[row, len(request.pages) :] == SCRATCH_PAGE).all()
        assert scheduler.pool.pages_for(request.most_cached) >= len(request.pages)
    assert (scheduler.table[scheduler.num_rows :] == SCRATCH_PAGE).all()


def test_a_prompt_is_prefilled_once_and_its_full_pages_are_shared():
    """A prompt of 11 tokens: 10 are prefilled, in two full pages and one of two tokens.

    Each of 4 members has the 2 full pages and a third of its own; the last member keeps the
    prefix's own third page. 2 + 4 pages instead of 12.
    """
    group = make_group("a", prompt_length=11, size=4)
    scheduler = make_scheduler(group, pages=20)
    admission = scheduler.admit()
    assert [tokens for tokens, _ in admission.prefills] == [list(range(10))]
    ((_, prefix),) = admission.prefills
    assert scheduler.pool.num_free == 20 - 6
    assert all(r.pages[:2] == prefix[:2] for r in group)
    assert len({r.pages[2] for r in group}) == 4
    assert admission.copies == [(prefix[2], r.pages[2]) for r in group[:3]]
    assert group[3].pages[2] == prefix[2]
    assert group[0].group.prefix == []


def test_a_prompt_that_fills_its_pages_needs_no_copy():
    """9 tokens: 8 are prefilled in two full pages, the ninth opens a page of each member."""
    scheduler = make_scheduler(make_group("a", prompt_length=9, size=3), pages=20)
    assert scheduler.admit().copies == []
    assert scheduler.pool.num_free == 20 - 2 - 3


def test_a_prompt_of_one_token_needs_no_prefill():
    scheduler = make_scheduler(make_group("a", prompt_length=1, size=2), pages=5)
    admission = scheduler.admit()
    assert (admission.prefills, admission.copies) == ([], [])
    assert len(scheduler.running) == 2


def test_the_prefix_is_held_for_members_that_wait_for_a_slot():
    group = make_group("a", prompt_length=11, size=3)
    scheduler = make_scheduler(group, pages=20, max_batch=1)
    assert len(scheduler.admit().prefills) == 1
    scheduler.leave(group[0])
    assert scheduler.pool.num_free == 20 - 3
    second = scheduler.admit()
    assert second.prefills == []
    assert second.copies == [(group[1].group.prefix[2], group[1].pages[2])]


def test_every_page_comes_back():
    groups = [make_group(str(i), prompt_length=2 + 3 * i, size=3, max_tokens=6) for i in range(4)]
    scheduler = make_scheduler(*groups, pages=12, max_batch=5)
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_free == 12
    assert all(r.num_sampled == 6 for group in groups for r in group)


def test_finished_requests_make_room_at_once():
    requests = [make_request(str(i), prompt_length=3, max_tokens=2) for i in range(5)]
    scheduler = make_scheduler(requests, pages=50, max_batch=2)
    seen = []
    while scheduler.has_work:
        seen.append([r.group.problem.id for r in step(scheduler)])
    assert seen == [["0", "1"]] * 2 + [["2", "3"]] * 2 + [["4"]] * 2


def test_pages_run_out_and_the_newest_request_yields():
    """3 pages of 4 and two requests of 4 tokens: at 5 tokens only one gets the third page."""
    old, new = make_request("old", 4), make_request("new", 4)
    scheduler = make_scheduler([old], [new], pages=3)
    assert step(scheduler) == [old, new]
    assert step(scheduler) == [old]
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [new]
    assert (new.num_sampled, new.pages) == (1, [])
    scheduler.leave(old)
    admission = scheduler.admit()
    assert [tokens for tokens, _ in admission.prefills] == [[0, 1, 2, 3]]
    assert len(new.pages) == 2


def test_preempted_requests_resume_before_new_ones():
    requests = [make_request(str(i), 4) for i in range(4)]
    scheduler = make_scheduler(requests, pages=5, max_batch=2)
    assert step(scheduler) == requests[:2]
    for request, count in zip(requests[:2], (8, 4), strict=True):
        sample(request, count)
        scheduler.lengths[request.row] += count
    assert scheduler.reserve()
    assert [r.group.problem.id for r in scheduler.running] == ["0"]
    assert [r.group.problem.id for r in scheduler.waiting] == ["1", "2", "3"]


def test_newcomers_leave_a_free_page_to_each_running_request():
    requests = [make_request(str(i), 3) for i in range(6)]
    scheduler = make_scheduler(requests, pages=6)
    scheduler.admit()
    assert len(scheduler.running) == 3
    assert scheduler.pool.num_free == 3


def test_a_held_prefix_gives_way_before_a_request_is_preempted():
    """4 pages, prompt of 6: the prefix has 2 pages, the first member shares one and copies one."""
    group = make_group("a", prompt_length=6, size=3)
    scheduler = make_scheduler(group, pages=4, max_batch=1)
    scheduler.admit()
    assert scheduler.pool.num_free == 1
    sample(group[0], 7)
    scheduler.lengths[0] += 7
    assert scheduler.reserve()
    assert scheduler.running == [group[0]]
    assert len(group[0].pages) == 4
    assert group[0].group.prefix == []
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("pages", [2, 3])
def test_sharing_is_given_up_when_only_one_request_fits(pages):
    """Prompt of 6, 2 tokens each: 2 pages suffice for one request, sharing would take 3."""
    group = make_group("a", prompt_length=6, size=3, max_tokens=2)
    scheduler = make_scheduler(group, pages=pages)
    while scheduler.has_work:
        step(scheduler)
    assert all(r.num_sampled == 2 for r in group)
    assert scheduler.pool.num_free == pages


# Steps in flight


def test_lengths_count_launched_steps_and_the_transcript_those_that_were_read():
    request = make_request("a", prompt_length=3, max_tokens=9)
    scheduler = make_scheduler([request], pages=9)
    scheduler.admit()
    for launched in range(5):
        assert scheduler.lengths[0] == 3 + launched
        scheduler.reserve()
        scheduler.advance()
    assert request.num_tokens == 3
    assert len(request.pages) == 2


def test_a_request_leaves_when_its_last_token_has_been_launched():
    """A prompt of 3 and 2 tokens to sample: the second step is the last, and 4 are cached."""
    request = make_request("a", prompt_length=3, max_tokens=2)
    scheduler = make_scheduler([request], pages=1)
    scheduler.admit()
    for _ in range(2):
        assert scheduler.has_work
        assert scheduler.reserve()
        scheduler.advance()
    assert not scheduler.has_work
    assert (request.row, scheduler.pool.num_free) == (None, 1)


def test_nobody_is_preempted_while_tokens_are_unread():
    old, new = make_request("old", 4), make_request("new", 4)
    scheduler = make_scheduler([old, new], pages=3)
    step(scheduler)
    assert not scheduler.reserve(can_preempt=False)
    assert scheduler.num_running == 2
    assert scheduler.num_preemptions == 0
    assert scheduler.reserve()
    assert scheduler.running == [old]


# Rows


def test_a_gap_is_refilled_by_the_next_request():
    requests = [make_request(str(i), 3) for i in range(4)]
    scheduler = make_scheduler(requests, pages=50, max_batch=3)
    scheduler.admit()
    scheduler.leave(requests[1])
    assert [r.row for r in scheduler.admit().started] == [1]
    assert scheduler.compact() == []
    assert scheduler.running == [requests[0], requests[3], requests[2]]


def test_without_anyone_waiting_the_last_rows_move_into_the_gaps():
    requests = [make_request(str(i), 3) for i in range(6)]
    scheduler = make_scheduler(requests, pages=50)
    scheduler.admit()
    for gap in (0, 3, 4):
        scheduler.leave(requests[gap])
    assert scheduler.compact() == [(5, 0)]
    assert scheduler.running == [requests[5], requests[1], requests[2]]
    check(scheduler)
    scheduler.leave(requests[2])
    assert scheduler.compact() == []
    assert scheduler.num_rows == 2


def test_the_newest_yields_even_if_it_has_the_first_row():
    requests = [make_request(str(i), 4) for i in range(3)]
    scheduler = make_scheduler(requests, pages=5, max_batch=2)
    scheduler.admit()
    scheduler.leave(requests[0])
    (newest,) = scheduler.admit().started
    assert (newest, newest.row) == (requests[2], 0)
    scheduler.lengths[:2] += 8  # three pages each
    scheduler.reserve()
    assert scheduler.running == [requests[1]]


# Looking ahead


def test_pages_are_reserved_ahead_for_all_rows_at_once():
    """Lengths 4 and 6 look 8 tokens ahead, to 12 and 14: 3 and 4 pages."""
    short, long = make_request("short", 4), make_request("long", 6)
    scheduler = make_scheduler([short, long], pages=50, lookahead=8)
    scheduler.admit()
    scheduler.reserve()
    assert [len(r.pages) for r in (short, long)] == [1, 2]  # nobody needs one yet
    scheduler.advance()
    scheduler.is_table_changed = False
    scheduler.reserve()
    assert [len(r.pages) for r in (short, long)] == [4, 4]  # 5 + 8 and 7 + 8 tokens
    assert scheduler.is_table_changed
    scheduler.is_table_changed = False
    for _ in range(8):
        scheduler.advance()
        scheduler.reserve()
    assert not scheduler.is_table_changed


def test_nothing_is_reserved_that_a_request_cannot_use():
    request = make_request("a", prompt_length=4, max_tokens=6)
    scheduler = make_scheduler([request], pages=50, lookahead=100)
    scheduler.admit()
    scheduler.advance()
    scheduler.reserve()
    assert len(request.pages) == 3  # 4 + 6 - 1 tokens


def test_pages_held_in_reserve_are_taken_back_before_anyone_is_preempted():
    """12 pages, 5 for each request: when one needs 8, the other gives up what it does not."""
    old, new = make_request("old", 4), make_request("new", 4)
    scheduler = make_scheduler([old, new], pages=12, lookahead=12)
    step(scheduler)
    step(scheduler)
    assert [len(r.pages) for r in (old, new)] == [5, 5]
    sample(old, 26)
    scheduler.lengths[old.row] += 26
    assert scheduler.reserve(can_preempt=False)
    assert len(old.pages) == 8
    assert len(new.pages) == 2


# Saved pages


def test_a_preempted_request_gets_its_saved_pages_back():
    old, new = make_request("old", 4), make_request("new", 4)
    saved = {}

    def save(pages):
        tensor = torch.zeros(2, 2, len(pages), PAGE, 1, 1)
        saved[tuple(pages)] = tensor
        return tensor

    scheduler = make_scheduler([old, new], pages=3, save=save)
    step(scheduler)
    pages = tuple(new.pages)
    step(scheduler)
    scheduler.leave(old)
    admission = scheduler.admit()
    assert list(saved) == [pages]
    assert admission.prefills == []
    ((tensor, target),) = admission.restores
    assert tensor is saved[pages]
    assert target == new.pages[:1]
    assert new.saved is None


def test_a_suspended_scheduler_gives_up_its_pages_and_keeps_the_order():
    """Two of three members run, and the prefix is held for the third."""
    group, late = make_group("a", prompt_length=6, size=3), make_request("late", 20)
    scheduler = make_scheduler(group, pages=20, max_batch=2)
    step(scheduler)
    scheduler.add([late])
    assert scheduler.table.shape[1] == scheduler.pool.pages_for(late.most_cached)
    check(scheduler)
    assert scheduler.suspend() == [*group, late]
    assert scheduler.pool.num_free == 20
    other = make_scheduler([*group, late], pages=50)
    prefilled = [tokens for tokens, _ in other.admit().prefills]
    assert prefilled == [[*range(6)], [*range(6)], [*range(5)], [*range(19)]]


@pytest.mark.parametrize("seed", range(30))
def test_any_course_keeps_the_books(seed):
    """Random prompts, ends and sizes: `check` holds at every launch and no page is lost."""
    rng = random.Random(seed)
    max_tokens = rng.randrange(1, 30)
    groups = [
        make_group(str(i), rng.randrange(1, 20), rng.randrange(1, 5), max_tokens)
        for i in range(rng.randrange(1, 8))
    ]
    most = max(PagePool(1, PAGE).pages_for(g[0].most_cached) for g in groups)
    scheduler = make_scheduler(
        *groups,
        pages=most + rng.randrange(12),
        max_batch=rng.randrange(1, 9),
        lookahead=rng.choice([0, 5, 64]),
    )
    steps = 0
    while scheduler.has_work:
        for request in step(scheduler):
            if request.row is not None and rng.random() < 0.1:
                scheduler.leave(request)
        steps += 1
    assert steps <= sum(len(g) for g in groups) * max_tokens
    assert scheduler.pool.num_free == scheduler.pool.num_pages


# Lengths


def test_the_longest_expected_come_first_and_unknown_ones_before_all():
    history = LengthHistory()
    a, b, c, d = (Problem(name, (1,)) for name in "abcd")
    history.record(a, 5)
    history.record(c, 9)
    history.record(a, 3)  # the longest counts
    asked = [Asked(p, 2) for p in (a, b, c, d)]
    assert [one.problem for one in history.order(asked)] == [b, d, c, a]
    assert [one.size for one in history.order([Asked(a, 1), Asked(a, 2)])] == [1, 2]


def test_a_problem_is_known_in_every_epoch():
    history = LengthHistory()
    history.record(Problem("x@7", (1,)), 5)
    history.record(Problem("y", (1,)), 9)
    asked = [Asked(Problem(p, (1,)), 1) for p in ("x@12", "y@2", "me@home")]
    ordered = history.order(asked)
    assert [one.problem.id for one in ordered] == ["me@home", "y@2", "x@12"]


def test_problems_that_never_come_again_are_forgotten():
    """Each later turn of an episode is one: a long run would remember millions."""
    history = LengthHistory(most=2)
    a, b, *turns = (Problem(name, (1,)) for name in ("a", "b", "b/0/2", "b/1/2"))
    for problem, length in ((a, 5), (b, 7), (a, 3), (turns[0], 9)):
        history.record(problem, length)
    known, unknown, turn = (Asked(problem, 1) for problem in (a, b, turns[0]))
    assert history.order([known, unknown]) == [unknown, known]
    history.record(a, 4)
    history.record(turns[1], 9)
    assert history.expect(a) == 5
    assert history.order([known, turn]) == [turn, known]


def test_the_longest_completion_is_remembered():
    """It is the forecast of an unknown problem, also when its own problem is forgotten."""
    history = LengthHistory(most=2)
    a, b, c, new = (Problem(name, (1,)) for name in ("a", "b", "c", "new"))
    assert history.expect(new) == 1
    for problem, length in ((a, 9), (b, 1), (c, 1)):
        history.record(problem, length)
    assert history.expect(a) == history.expect(new) == 9


def test_requests_wait_for_company_while_others_run():
    """Ten rows with a patience of 2: newcomers are let in when 20 row-steps have stayed empty."""
    first = [make_request(str(i), 3) for i in range(10)]
    later = [make_request(f"late {i}", 3) for i in range(9)]
    scheduler = make_scheduler(first, later, pages=1000, max_batch=10, patience=2.0)
    assert len(step(scheduler)) == 10
    for request in first[:4]:
        scheduler.leave(request)
    for _ in range(5):  # 4 rows are empty in each
        assert len(step(scheduler)) == 6
    assert len(step(scheduler)) == 10
    assert len(scheduler.waiting) == 5
    scheduler.leave(first[4])  # the count has begun again
    for _ in range(20):
        assert len(step(scheduler)) == 9
    assert len(step(scheduler)) == 10


def test_nobody_waits_for_company_alone():
    first, later = make_request("a", 3), make_request("b", 3)
    scheduler = make_scheduler([first, later], pages=1000, max_batch=1, patience=100.0)
    assert step(scheduler) == [first]
    scheduler.leave(first)
    assert step(scheduler) == [later]
