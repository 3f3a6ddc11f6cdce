"""JitRL: a policy that learns from a memory of returns while it acts, without gradients.

    max over pi of  E_pi[A] - KL(pi || pi0) / beta    =>    pi = pi0 exp(beta A) / Z

pi0 proposes a few actions, each a text. The memory holds what actions in similar states earned:

    G_t = r_t + gamma G_{t+1}        A_a = (mean of G over a) - (mean over all G),  0 if a is unseen

A is divided by its largest positive value (else by the size of its smallest), so beta alone says
how far pi moves. Actions that paid off before and are not proposed now get a small pi0.

`is_official` does what the released code does: it scores by pi0 + weight A and takes the best, and
values an action that it has not seen optimistically, with a probability that falls with experience.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from qurl.seeds import generator

Propose = Callable[[str, Sequence[str]], Mapping[str, float]]
"""pi0: (state, actions so far) to probabilities of a few actions."""
FLOOR = 1e-3
"""pi0 of an action from the memory that was not proposed."""


@dataclass(frozen=True)
class Experience:
    """One action of an episode that has ended."""

    state: str
    history: tuple[str, ...]
    """The actions before it."""
    action: str
    value: float
    """G: its discounted return."""


@dataclass(frozen=True)
class Options:
    """How to remember and to decide."""

    beta: float = 2.0
    gamma: float = 0.5
    neighbours: int = 10
    threshold: float = 0.95
    """Similarity of a neighbour; it falls by 0.1 over the first 20 steps of an episode."""
    twin: float = 0.98
    """Neighbours more similar than this are all kept."""
    per_state: int = 100
    """Experiences kept of one state, the newest ones, so that old mistakes fade."""
    is_official: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Decision:
    action: str
    policy: Mapping[str, float]
    metrics: Mapping[str, float]


class Memory:
    """Experiences of all episodes so far."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._by_state: dict[str, deque[Experience]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_state.values()))

    def add_episode(self, steps: Sequence[tuple[str, str, float]]) -> None:
        """Remember an episode: (state, action, reward) of each step."""
        rewards = [reward for _, _, reward in steps]
        actions = tuple(action for _, action, _ in steps)
        values = discounted(rewards, self.options.gamma)
        for t, ((state, action, _), value) in enumerate(zip(steps, values, strict=True)):
            newest = deque[Experience](maxlen=self.options.per_state)
            kept = self._by_state.setdefault(state, newest)
            kept.append(Experience(state, actions[:t], action, value))

    def retrieve(self, state: str, history: Sequence[str]) -> list[tuple[float, Experience]]:
        """(similarity, experience): all twins, then the most similar others up to `neighbours`."""
        options = self.options
        threshold = options.threshold - 0.1 * min(1.0, len(history) / 20)
        of_state = {known: jaccard(state, known, 4) for known in self._by_state}
        found = [
            (0.3 * jaccard(" ".join(history), " ".join(e.history), 1) + 0.7 * of_state[known], e)
            for known, experiences in self._by_state.items()
            if 0.3 + 0.7 * of_state[known] > threshold
            for e in experiences
        ]
        found = sorted((pair for pair in found if pair[0] > threshold), key=lambda pair: -pair[0])
        num_twins = sum(similarity > options.twin for similarity, _ in found)
        return found[: max(num_twins, options.neighbours)]


class JitRL:
    """Acts by a proposal and the memory of its own episodes."""

    def __init__(self, propose: Propose, options: Options = Options()) -> None:
        self.propose, self.options, self.memory = propose, options, Memory(options)
        self.num_episodes = 0

    def learn(self, steps: Sequence[tuple[str, str, float]]) -> None:
        """Take in an episode that has ended: (state, action, reward) of each step."""
        self.memory.add_episode(steps)
        self.num_episodes += 1

    def act(self, state: str, history: Sequence[str]) -> Decision:
        """Choose an action; the same call in the same episode chooses the same."""
        neighbours = self.memory.retrieve(state, history)
        returns: dict[str, list[float]] = defaultdict(list)
        for _, experience in neighbours:
            returns[experience.action].append(experience.value)
        proposed = dict(self.propose(state, history))
        paying = [a for a, values in returns.items() if statistics.fmean(values) > 0]
        prior = proposed | {a: 0.0 for a in paying if a not in proposed}
        if not prior:
            raise ValueError(
                f"propose returned no action for the state {state[:200]!r}, and the memory has "
                "none that paid off; return one at least"
            )
        floored = {a: max(p, FLOOR) for a, p in prior.items()}
        draws = generator(self.options.seed, "jitrl", self.num_episodes, len(history))
        explore = exploration(returns)
        if self.options.is_official:
            found = optimistic_advantages(returns, prior, explore, draws)
            weight = min(1 + 0.5 * self.num_episodes / 50, 1.5)
            # Others than those of `prior` count for the unit.
            hat, advantages = normalise(found), {a: found[a] for a in prior}
            scores = {a: p + weight * hat[a] for a, p in prior.items()}
            action = _best(scores)
            policy = {a: float(a == action) for a in prior}
        else:
            advantages = mean_advantages(returns, prior)
            policy = improve(floored, normalise(advantages), self.options.beta)
            weights = torch.tensor(list(policy.values()), dtype=torch.float64)
            action = list(policy)[int(torch.multinomial(weights, 1, generator=draws))]
        metrics = {
            "jitrl/retrieved": float(len(neighbours)),
            "jitrl/similarity": _mean(similarity for similarity, _ in neighbours),
            "jitrl/value": _mean(value for values in returns.values() for value in values),
            "jitrl/max_advantage": max(advantages.values()),
            "jitrl/explore": explore,
            "jitrl/changed": float(_best(policy) != _best(prior)),
            "jitrl/kl": divergence(policy, floored),
        }
        return Decision(action, policy, metrics)


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_t = sum over u >= t of gamma^(u - t) r_u."""
    values, value = [], 0.0
    for reward in reversed(rewards):
        value = reward + gamma * value
        values.append(value)
    return values[::-1]


def jaccard(a: str, b: str, size: int) -> float:
    """Shared word n-grams over all of both; a shorter text is one n-gram."""
    first, second = _grams(a, size), _grams(b, size)
    union = first | second
    return len(first & second) / len(union) if union else 1.0


@functools.lru_cache(maxsize=4096)  # a text is compared with every new state
def _grams(text: str, size: int) -> frozenset[tuple[str, ...]]:
    words = text.lower().split()
    if len(words) <= size:
        return frozenset([tuple(words)] if words else [])
    return frozenset(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def mean_advantages(
    returns: Mapping[str, Sequence[float]], actions: Iterable[str]
) -> dict[str, float]:
    """A_a = Q_a - V; 0 of an action without returns."""
    value = _mean(x for values in returns.values() for x in values)
    return {a: statistics.fmean(x) - value if (x := returns.get(a)) else 0.0 for a in actions}


def optimistic_advantages(
    returns: Mapping[str, Sequence[float]],
    actions: Iterable[str],
    explore: float,
    draws: torch.Generator,
) -> dict[str, float]:
    """A of the released code: an unseen action has Q = V + 1/n with probability `explore`, else 0.

    If any is unseen, V is the mean of Q over actions. Actions that have returns and are not among
    `actions` count too, and have an A. Without any returns, all A are 0.
    """
    values = {a: statistics.fmean(x) for a, x in returns.items() if x}
    if not values:
        return dict.fromkeys(actions, 0.0)
    seen = [x for own in returns.values() for x in own]
    value = _mean(seen)
    unseen = [a for a in actions if a not in values]
    for a in unseen:
        is_tried = float(torch.rand((), generator=draws)) < explore
        values[a] = value + 1 / len(seen) if is_tried else 0.0
    if unseen:
        value = _mean(values.values())
    return {a: q - value for a, q in values.items()}


def exploration(returns: Mapping[str, Sequence[float]]) -> float:
    """clamp(1 / (1 + c), 0.05, 0.8), with c the confidence in the best action that was repeated.

    c = max over a of (Q / (1 + std / Q))^0.65 max(n / 4, 1), of actions with n >= 2 and Q > 0.
    """
    confidence = 0.0
    for values in returns.values():
        mean = statistics.fmean(values) if values else 0.0
        if len(values) >= 2 and mean > 0:
            spread = 1 + statistics.pstdev(values) / mean
            confidence = max(confidence, (mean / spread) ** 0.65 * max(len(values) / 4, 1))
    return min(max(1 / (1 + confidence), 0.05), 0.8)


def normalise(advantages: Mapping[str, float]) -> dict[str, float]:
    """A over its largest positive value, or over the size of its smallest if none is positive."""
    unit = max(advantages.values())
    unit = unit if unit > 0 else abs(min(advantages.values()))
    return {a: x / unit if unit > 0 else 0.0 for a, x in advantages.items()}


def improve(
    prior: Mapping[str, float], advantages: Mapping[str, float], beta: float
) -> dict[str, float]:
    """pi = pi0 exp(beta A) / Z."""
    logits = {a: math.log(p) + beta * advantages[a] for a, p in prior.items()}
    top = max(logits.values())
    weights = {a: math.exp(z - top) for a, z in logits.items()}
    total = sum(weights.values())
    return {a: w / total for a, w in weights.items()}


def divergence(policy: Mapping[str, float], prior: Mapping[str, float]) -> float:
    """KL(pi || pi0); pi0 is scaled to a sum of 1."""
    total = sum(prior.values())
    return sum(p * math.log(p * total / prior[a]) for a, p in policy.items() if p > 0)


def _best(scores: Mapping[str, float]) -> str:
    return max(scores, key=lambda action: scores[action])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.fmean(values) if values else 0.0
