"""JitRL: the closed form, retrieval, the released code's numbers, and returns that rise."""

import importlib
import math
from statistics import mean

import pytest
import torch

from qurl.rollout.jitrl import (
    FLOOR,
    JitRL,
    Memory,
    Options,
    discounted,
    divergence,
    exploration,
    improve,
    jaccard,
    mean_advantages,
    normalise,
    optimistic_advantages,
)
from qurl.seeds import generator


def objective(policy, prior, advantages, beta):
    expected = sum(p * advantages[a] for a, p in policy.items())
    return expected - divergence(policy, prior) / beta


def test_vector(vectors):
    case = vectors("systems.json")["jitrl"]
    actions = ("a", "b", "c")
    prior = dict(zip(actions, case["pi0"], strict=True))
    advantages = mean_advantages(case["returns"], actions)
    assert list(advantages.values()) == pytest.approx(case["advantages"], rel=1e-12)
    assert mean(x for xs in case["returns"].values() for x in xs) == pytest.approx(case["V"])
    policy = improve(prior, advantages, case["beta"])
    assert list(policy.values()) == pytest.approx(case["pi"], rel=1e-12)
    found = objective(policy, prior, advantages, case["beta"])
    assert found == pytest.approx(case["objective"], rel=1e-9)


def test_the_closed_form_is_optimal():
    """No other policy near it has a larger objective."""
    prior, advantages = {"a": 0.5, "b": 0.4, "c": 0.1}, {"a": -1.0, "b": 0.5, "c": 1.0}
    policy = improve(prior, advantages, 2.0)
    best = objective(policy, prior, advantages, 2.0)
    draws = torch.Generator().manual_seed(0)
    for _ in range(100):
        noise = torch.exp(0.3 * torch.randn(3, generator=draws)).tolist()
        moved = {a: p * n for (a, p), n in zip(policy.items(), noise, strict=True)}
        moved = {a: p / sum(moved.values()) for a, p in moved.items()}
        assert objective(moved, prior, advantages, 2.0) <= best + 1e-12


def test_similarities_by_hand():
    """Of 4-grams: "a b c d" and "b c d e" of the first, of which the second shares one of 2 + 1."""
    assert jaccard("a b c d e", "x b c d e", 4) == pytest.approx(1 / 3)
    assert jaccard("go up", "go down", 1) == pytest.approx(1 / 3)
    assert jaccard("", "", 1) == 1.0
    assert jaccard("short text", "short text", 4) == 1.0
    assert jaccard("short text", "", 4) == 0.0


def test_returns_by_hand():
    assert discounted([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]


STATE = "you stand in a small dark room with one door"


def test_retrieval_keeps_twins_and_fills_up():
    """The same state with another history has 0.7 + 0.3 * 1/3 = 0.8, below 0.95."""
    memory = Memory(Options(neighbours=3))
    for reward in range(5):
        memory.add_episode([(STATE, "wait", float(reward))])
    assert len(memory.retrieve(STATE, [])) == 5, "twins are all kept"
    assert memory.retrieve("another place altogether, far from here", []) == []
    memory.add_episode([("start", "go up", 0.0), (STATE, "wait", 9.0)])
    assert {e.value for _, e in memory.retrieve(STATE, ["go up"])} == {9.0}
    assert memory.retrieve(STATE, ["go down"]) == []
    loose = Memory(Options(neighbours=3, threshold=0.75))
    loose.add_episode([("start", "go up", 0.0), (STATE, "wait", 9.0)])
    [(similarity, _)] = loose.retrieve(STATE, ["go down"])
    assert similarity == pytest.approx(0.8)


def test_fewer_twins_than_neighbours_leave_room_for_the_best_others():
    memory = Memory(Options(neighbours=2, threshold=0.3))
    near, far = STATE.replace("one", "no"), STATE.replace("small dark room with one", "hut with a")
    for state in (far, near, STATE):
        memory.add_episode([(state, "wait", 1.0)])
    found = memory.retrieve(STATE, [])
    assert [e.state for _, e in found] == [STATE, near]
    assert found[0][0] == 1.0


def test_the_threshold_falls_within_an_episode():
    """The histories share two words of three: 0.7 + 0.3 * 2/3 = 0.9. 0.95 becomes 0.85."""
    memory = Memory(Options())
    memory.add_episode([("start", "wait look", 0.0), (STATE, "go", 1.0)])
    assert memory.retrieve(STATE, ["wait", "look", "jump"]) == []
    assert len(memory.retrieve(STATE, [*["wait"] * 18, "look", "jump"])) == 1


def test_old_experiences_of_a_state_fade():
    memory = Memory(Options(per_state=3))
    for reward in range(5):
        memory.add_episode([(STATE, "wait", float(reward))])
    assert [e.value for _, e in memory.retrieve(STATE, [])] == [2.0, 3.0, 4.0]
    assert len(memory) == 3


def test_advantages_are_normalised():
    assert normalise({"a": 2.0, "b": -1.0}) == {"a": 1.0, "b": -0.5}
    assert normalise({"a": -2.0, "b": -4.0}) == {"a": -0.5, "b": -1.0}
    assert normalise({"a": 0.0}) == {"a": 0.0}


def test_the_released_codes_numbers_by_hand():
    """Q of a is 2, of b 6, V = 3; c is unseen: tried, its Q is 3 + 1/4, else 0."""
    returns = {"a": [1.0, 2.0, 3.0], "b": [6.0]}
    draws = generator(0, "test")
    tried = optimistic_advantages(returns, "abc", 1.0, draws)
    value = (2 + 6 + 3.25) / 3
    assert list(tried.values()) == pytest.approx([2 - value, 6 - value, 3.25 - value])
    left = optimistic_advantages(returns, "abc", 0.0, draws)
    assert list(left.values()) == pytest.approx([2 - 8 / 3, 6 - 8 / 3, -8 / 3])
    assert optimistic_advantages(returns, "ab", 1.0, draws) == {"a": -1.0, "b": 3.0}
    # a counts for V, n and the mean of Q, although it is no candidate.
    away = optimistic_advantages(returns, "bc", 1.0, draws)
    assert away == pytest.approx({"a": 2 - value, "b": 6 - value, "c": 3.25 - value})
    assert optimistic_advantages({}, "bc", 1.0, draws) == {"b": 0.0, "c": 0.0}
    cv = math.sqrt(2 / 3) / 2
    assert exploration(returns) == pytest.approx(1 / (1 + (2 / (1 + cv)) ** 0.65))
    assert exploration({"b": [6.0]}) == 0.8
    assert exploration({"a": [1000.0] * 80}) == 0.05


def test_what_paid_off_is_considered_though_not_proposed():
    for is_official in (False, True):
        agent = JitRL(lambda state, history: {"no": 1.0}, Options(is_official=is_official))
        before = agent.act(STATE, [])
        assert (before.action, before.metrics["jitrl/retrieved"]) == ("no", 0.0)
        agent.learn([(STATE, "yes", 1.0)])
        agent.learn([(STATE, "no", -1.0)])
        decision = agent.act(STATE, [])
        assert decision.policy.keys() == {"no", "yes"}
        if is_official:
            assert decision.action == "yes"
            assert decision.metrics["jitrl/changed"] == 1.0
        else:
            assert decision.policy["yes"] == pytest.approx(
                FLOOR * math.e**2 / (FLOOR * math.e**2 + math.e**-2)
            )


@pytest.mark.parametrize("is_official", [False, True])
def test_a_state_without_actions_is_named(is_official):
    agent = JitRL(lambda state, history: {}, Options(is_official=is_official))
    with pytest.raises(ValueError, match="propose returned no action for the state 'a cellar'"):
        agent.act("a cellar", [])
    agent.learn([("a cellar", "up", 1.0)])
    assert agent.act("a cellar", []).action == "up"


def test_the_released_code_explores_only_what_it_has_a_memory_of():
    """Without a neighbour it takes the most likely action, whatever the seed."""
    for seed in range(20):
        options = Options(is_official=True, seed=seed)
        agent = JitRL(lambda state, history: {"often": 0.6, "seldom": 0.4}, options)
        assert agent.act(STATE, []).action == "often"


def walk(agent, length=5):
    """A chain whose right end pays 1; the proposal prefers left."""
    place, steps = 0, []
    for _ in range(12):
        state = f"you are at place number {place} of the chain"
        action = agent.act(state, [action for _, action, _ in steps]).action
        place = max(0, place + (1 if action == "right" else -1))
        steps.append((state, action, float(place == length)))
        if place == length:
            break
    agent.learn(steps)
    return sum(reward for _, _, reward in steps)


def test_returns_on_a_chain_rise_without_gradients():
    def last_returns(beta):
        runs = []
        for seed in range(3):
            options = Options(beta=beta, gamma=0.9, threshold=0.7, seed=seed)
            agent = JitRL(lambda state, history: {"left": 0.55, "right": 0.45}, options)
            runs.append([walk(agent) for _ in range(40)])
        return mean(mean(run[-10:]) for run in runs)

    plain, learned = last_returns(1e-9), last_returns(6.0)
    assert plain < 0.6
    assert learned > 0.9


def test_the_text_game(capsys):
    """Of 15 points; the released code finds the key and then always does what paid before."""
    game = importlib.import_module("examples.jitrl_text_game")
    game.main(episodes=40, seeds=2)
    lines = capsys.readouterr().out.splitlines()
    last = {line[:16].strip(): float(line.rpartition(" ")[2]) for line in lines}
    assert last["proposal alone"] < 4 < last["released code"] < 7 < last["jitrl"]
