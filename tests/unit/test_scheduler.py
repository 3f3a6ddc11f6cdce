import pytest

from qurl.rollout.local.cache import PagePool
from qurl.rollout.local.scheduler import Group, Request, Scheduler
from qurl.types import Problem

PAGE = 4


def make_group(name: str, prompt_length: int, size: int) -> list[Request]:
    problem = Problem(name, tuple(range(prompt_length)))
    group = Group(num_unadmitted=size)
    return [Request(problem, group, key=i) for i in range(size)]


def make_scheduler(*groups: list[Request], pages: int, max_batch: int = 100) -> Scheduler:
    requests = [request for group in groups for request in group]
    return Scheduler(requests, PagePool(pages, PAGE), max_batch)


def step(scheduler: Scheduler, max_tokens: int = 10**9) -> list[Request]:
    """Admit, reserve, append a token to each running request, retire the finished ones."""
    scheduler.admit()
    running = list(scheduler.reserve())
    for request in running:
        request.token_ids.append(0)
        if len(request.token_ids) == max_tokens:
            request.finish = "length"
            scheduler.finish(request)
    return running


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
    group[0].finish = "stop"
    scheduler.finish(group[0])
    assert scheduler.pool.num_free == 20 - 3
    second = scheduler.admit()
    assert second.prefills == []
    assert second.copies == [(group[1].group.prefix[2], group[1].pages[2])]


def test_every_page_comes_back():
    groups = [make_group(str(i), prompt_length=2 + 3 * i, size=3) for i in range(4)]
    scheduler = make_scheduler(*groups, pages=12, max_batch=5)
    while scheduler.has_work:
        step(scheduler, max_tokens=6)
    assert scheduler.pool.num_free == 12
    assert all(len(r.token_ids) == 6 for group in groups for r in group)


def test_finished_requests_make_room_at_once():
    groups = [make_group(str(i), prompt_length=3, size=1) for i in range(5)]
    scheduler = make_scheduler(*groups, pages=50, max_batch=2)
    seen = []
    while scheduler.has_work:
        seen.append([r.problem.id for r in step(scheduler, max_tokens=2)])
    assert seen == [["0", "1"]] * 2 + [["2", "3"]] * 2 + [["4"]] * 2


def test_pages_run_out_and_the_newest_request_yields():
    """3 pages of 4 and two requests of 4 tokens: at 5 tokens only one gets the third page."""
    old, new = make_group("old", 4, 1)[0], make_group("new", 4, 1)[0]
    scheduler = make_scheduler([old], [new], pages=3)
    assert step(scheduler) == [old, new]
    assert step(scheduler) == [old]
    assert scheduler.num_preemptions == 1
    assert list(scheduler.waiting) == [new]
    assert (new.token_ids, new.pages) == ([0], [])
    scheduler.finish(old)
    admission = scheduler.admit()
    assert [tokens for tokens, _ in admission.prefills] == [[0, 1, 2, 3]]
    assert len(new.pages) == 2


def test_preempted_requests_resume_before_new_ones():
    requests = [make_group(str(i), 4, 1)[0] for i in range(4)]
    scheduler = make_scheduler(requests, pages=5, max_batch=2)
    step(scheduler)
    assert [r.problem.id for r in scheduler.running] == ["0", "1"]
    scheduler.running[0].token_ids += [0] * 8
    scheduler.running[1].token_ids += [0] * 4
    scheduler.reserve()
    assert [r.problem.id for r in scheduler.running] == ["0"]
    assert [r.problem.id for r in scheduler.waiting] == ["1", "2", "3"]


def test_newcomers_leave_a_free_page_to_each_running_request():
    requests = [make_group(str(i), 3, 1)[0] for i in range(6)]
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
    group[0].token_ids += [0] * 7
    assert scheduler.reserve() == [group[0]]
    assert len(group[0].pages) == 4
    assert group[0].group.prefix == []
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("pages", [2, 3])
def test_sharing_is_given_up_when_only_one_request_fits(pages):
    """Prompt of 6, 2 tokens each: 2 pages suffice for one request, sharing would take 3."""
    group = make_group("a", prompt_length=6, size=3)
    scheduler = make_scheduler(group, pages=pages)
    while scheduler.has_work:
        step(scheduler, max_tokens=2)
    assert all(len(r.token_ids) == 2 for r in group)
    assert scheduler.pool.num_free == pages
