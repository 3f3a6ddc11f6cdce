"""Low-Precision RL's own case: soft actor-critic in FP16, naive and with its six methods.

    python -m benchmarks.low_precision_sac [--updates 800] [--seeds 4]

A point mass must come to rest at the origin. Parameters, activations, gradients, moments and target
network have the dtype of the arm. The methods (Bjorck et al., ICML 2021):

    1 hAdam                  h = sqrt(v), which does not underflow          qurl.trainer.hadam
    2 compound loss scaling  the loss, m, h and eps times S                 qurl.trainer.hadam
    3 normal-fix             ((x - mu) / sigma)^2 and not (x - mu)^2 / sigma^2
    4 softplus-fix           linear above 10: exp(20) overflows
    5 Kahan-momentum         target network in a buffer times C, with Kahan's sum
    6 Kahan-gradients        updates of critic and temperature with Kahan's sum

Takes about ten seconds per arm and seed on an idle core. Writes
benchmarks/results/low_precision_sac.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.scripts import RESULTS, write_result
from qurl.bench.record import describe_machine
from qurl.trainer.hadam import HAdam

ENVS, HORIZON, BATCH, WIDTH = 32, 40, 128, 64
GAMMA, TAU, TARGET_SCALE = 0.95, 0.01, 1e4
LR, BETAS = 1e-3, (0.9, 0.999)
LOG_STD = (-5.0, 2.0)


@dataclass(frozen=True)
class Arm:
    dtype: torch.dtype
    is_fixed: bool
    """Whether the six methods are used."""


ARMS = {
    "fp32": Arm(torch.float32, is_fixed=False),
    "fp16, naive": Arm(torch.float16, is_fixed=False),
    "fp16, six methods": Arm(torch.float16, is_fixed=True),
}


class PointMass:
    """Many at once: position and speed [ENVS, 2]; a force in [-1, 1]; reward in [0, 1]."""

    def __init__(self, seed: int) -> None:
        self.draws = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self) -> None:
        self.state, self.age = 2 * torch.rand(ENVS, 2, generator=self.draws) - 1, 0

    def step(self, force: Tensor) -> Tensor:
        x, v = self.state.unbind(-1)
        v = (0.9 * v + 0.2 * force).clamp(-1, 1)
        x = (x + 0.2 * v).clamp(-2, 2)
        self.state, self.age = torch.stack([x, v], -1), self.age + 1
        return torch.exp(-4 * (x.square() + 0.1 * v.square()))


def normal_log_prob(x: Tensor, mean: Tensor, log_std: Tensor, *, is_fixed: bool) -> Tensor:
    std = log_std.exp()
    square = ((x - mean) / std).square() if is_fixed else (x - mean).square() / std.square()
    return -0.5 * square - log_std - 0.5 * math.log(2 * math.pi)


def tanh_log_slope(x: Tensor, *, is_fixed: bool) -> Tensor:
    """log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x))."""
    y = -2 * x
    threshold = 10 if is_fixed else 20
    softplus = torch.where(y > threshold, y, torch.log1p(y.clamp(max=threshold).exp()))
    return 2 * (math.log(2) - x - softplus)


def network(inputs: int, outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


class Target:
    """An average of a network's parameters: t = t + tau (p - t)."""

    def __init__(self, net: nn.Module, make: nn.Module, *, is_fixed: bool) -> None:
        self.net, self.is_fixed = make, is_fixed
        make.load_state_dict(net.state_dict())
        scale = TARGET_SCALE if is_fixed else 1.0
        self.scaled = [scale * p.detach() for p in net.parameters()]
        self.compensations = [torch.zeros_like(p) for p in self.scaled]

    @torch.no_grad()
    def follow_(self, net: nn.Module) -> None:
        buffers = zip(net.parameters(), self.scaled, self.compensations, strict=True)
        for own, (p, scaled, c) in zip(self.net.parameters(), buffers, strict=True):
            if self.is_fixed:
                add_compensated_(scaled, c, TAU * (TARGET_SCALE * p - scaled))
                own.copy_(scaled / TARGET_SCALE)
            else:
                own.add_(TAU * (p - own))


def add_compensated_(total: Tensor, compensation: Tensor, update: Tensor) -> None:
    """total += update, with what rounding loses kept for the next time.

    y = update - c;   t = total + y;   c = (t - total) - y;   total = t
    """
    y = update - compensation
    new = total + y
    compensation.copy_((new - total) - y)
    total.copy_(new)


class CompensatedHAdam(HAdam):
    """Updates parameters of any dtype in their own arithmetic, with Kahan's sum; no decay."""

    def _move(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        compensation = self.state[parameter].setdefault("compensation", torch.zeros_like(parameter))
        add_compensated_(parameter, compensation, -group["lr"] * direction)


class Updater:
    """An optimizer with the loss scale of its own, or plain Adam."""

    def __init__(self, parameters: list[Tensor], arm: Arm, *, is_compensated: bool) -> None:
        options = {"lr": LR, "betas": BETAS}
        self.hadam, self.num_skipped = None, 0
        if arm.is_fixed:
            options["moments"] = arm.dtype
            kind = CompensatedHAdam if is_compensated else HAdam
            self.hadam = kind([{"params": parameters}], **options)
        self.optimizer = self.hadam or torch.optim.Adam(parameters, foreach=False, **options)

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.hadam.scale if self.hadam else 1.0
        (loss * scale).backward()
        if self.hadam:
            self.num_skipped += not self.hadam.step(clip=1 / scale)
        else:
            self.optimizer.step()


class Agent:
    def __init__(self, arm: Arm, seed: int) -> None:
        torch.manual_seed(seed)
        self.arm, dtype = arm, arm.dtype
        self.actor = network(2, 2).to(dtype)
        self.critics = nn.ModuleList(network(3, 1) for _ in range(2)).to(dtype)
        empty = nn.ModuleList(network(3, 1) for _ in range(2)).to(dtype)
        self.target = Target(self.critics, empty, is_fixed=arm.is_fixed)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(0.1), dtype=dtype))
        self.updaters = {
            "actor": Updater([*self.actor.parameters()], arm, is_compensated=False),
            "critic": Updater([*self.critics.parameters()], arm, is_compensated=True),
            "alpha": Updater([self.log_alpha], arm, is_compensated=True),
        }

    def sample(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B] and their log-probs."""
        mean, raw = self.actor(state).unbind(-1)
        low, high = LOG_STD
        log_std = low + 0.5 * (high - low) * (raw.tanh() + 1)
        x = mean + log_std.exp() * noise
        is_fixed = self.arm.is_fixed
        logp = normal_log_prob(x, mean, log_std, is_fixed=is_fixed)
        return x.tanh(), logp - tanh_log_slope(x, is_fixed=is_fixed)

    def update(self, batch: tuple[Tensor, ...], draws: torch.Generator) -> None:
        state, action, reward, after = (x.to(self.arm.dtype) for x in batch)
        noise = torch.randn(2, len(state), generator=draws).to(self.arm.dtype)
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            following, logp = self.sample(after, noise[0])
            value = _q(self.target.net, after, following).amin(0) - alpha * logp
            wanted = reward + GAMMA * value
        error = _q(self.critics, state, action) - wanted
        self.updaters["critic"].step(error.square().mean(1).sum())
        chosen, logp = self.sample(state, noise[1])
        self.updaters["actor"].step((alpha * logp - _q(self.critics, state, chosen).amin(0)).mean())
        entropy_gap = (-logp.detach() + 1.0).mean()  # the wanted entropy is -1, one per action
        self.updaters["alpha"].step(self.log_alpha.exp() * entropy_gap)
        self.target.follow_(self.critics)


def _q(critics: nn.Module, state: Tensor, action: Tensor) -> Tensor:
    """[2, B]."""
    x = torch.cat([state, action[:, None]], -1)
    return torch.stack([critic(x).squeeze(-1) for critic in critics])  # type: ignore[operator]


@torch.no_grad()
def evaluate(agent: Agent, seed: int) -> float:
    """Mean reward of the deterministic policy over an episode, of 1."""
    env, rewards = PointMass(seed), []
    for _ in range(HORIZON):
        mean = agent.actor(env.state.to(agent.arm.dtype))[:, 0]
        rewards.append(env.step(mean.tanh().float()).mean().item())
    return statistics.fmean(rewards)


def train(arm: Arm, seed: int, updates: int) -> tuple[Agent, float]:
    agent, env, draws = Agent(arm, seed), PointMass(seed), torch.Generator().manual_seed(seed)
    memory: list[tuple[Tensor, ...]] = []
    for _ in range(updates):
        noise = torch.randn(ENVS, generator=draws)
        with torch.no_grad():
            action = agent.sample(env.state.to(arm.dtype), noise.to(arm.dtype))[0].float()
        before, reward = env.state, env.step(action)
        memory.append((before, action, reward, env.state))
        if env.age == HORIZON:
            env.reset()
        picked = torch.randint(len(memory), (BATCH // ENVS,), generator=draws).tolist()
        columns = zip(*(memory[i] for i in picked), strict=True)
        agent.update(tuple(torch.cat(column) for column in columns), draws)
    return agent, evaluate(agent, seed=10_000 + seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'arm':20}{'reward per step':>26}{'skipped':>10}{'S':>10}{'seconds':>10}")
    for name, arm in ARMS.items():
        start, scores, skipped, scale = time.perf_counter(), [], 0, 1.0
        for seed in range(options.seeds):
            agent, score = train(arm, seed, options.updates)
            scores.append(score)
            skipped += sum(u.num_skipped for u in agent.updaters.values())
            hadam = agent.updaters["critic"].hadam
            scale = hadam.scale if hadam else 1.0
        shown = " ".join(f"{score:.3f}" for score in scores)
        seconds = (time.perf_counter() - start) / options.seeds
        print(f"{name:20}{shown:>26}{skipped:>10}{scale:>10g}{seconds:>10.1f}", flush=True)
        known = [score if math.isfinite(score) else None for score in scores]
        rows.append({"arm": name, "reward_per_step": known, "skipped": skipped, "scale": scale})
    write_result(
        RESULTS / "low_precision_sac.json",
        versions=describe_machine(torch.device("cpu"))["versions"],
        updates=options.updates,
        rows=rows,
    )


if __name__ == "__main__":
    main()
