"""The keys of related systems, each a part on a plug point (docs/systems.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from qurl.config.fields import (
    Count,
    CountOrZero,
    FilePath,
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Temperature,
)


@dataclass(frozen=True)
class GresoConfig(Section):
    """GRESO: skips problems that were all right or all wrong before. `sampling.select = "greso"`.

    P(skip) = 1 - max(p^z, explore) after z such groups in a row.
    """

    p: Fraction = 0.5
    """Base p at the start, for easy and for hard problems."""
    step: Fraction = 0.01
    """Change of p after each step, towards the targets."""
    easy_target: Fraction = 0.25 / 3
    """Share of groups that are all right which p of easy problems aims at."""
    hard_target: Fraction = 0.5 / 3
    """Share of groups that are all wrong which p of hard problems aims at."""
    explore: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.01
    """Smallest chance that a problem is asked."""
    easy_above: Fraction = 0.98
    """Mean accuracy from which on a group counts as all right."""
    hard_below: Fraction = 0.11
    """Mean accuracy up to which a group counts as all wrong."""


@dataclass(frozen=True)
class DotsConfig(Section):
    """DOTS: asks problems of middling difficulty, as predicted. `sampling.select = "dots"`.

    P(problem) ~ exp(-|predicted accuracy - target| / sharpness).
    """

    every: Count = 2
    """Steps between predictions."""
    references: CountOrZero = 256
    """Problems that are answered before each prediction, for nothing else; 0 = use the history."""
    target: Fraction = 0.5
    """Accuracy of the problems that are wanted."""
    sharpness: Positive = 1e-3
    """Small: only the nearest; large: any."""
    encoder: FilePath = ""
    """Model that embeds questions (mean of its last hidden states); empty = bags of tokens."""
    predictor: FilePath = ""
    """Trained predictor (`qurl.sampling.predictor`); empty = attention over the embeddings."""
    calibrate: Flag = True
    """Fit predictions to the references by least squares, each predicted without itself."""
    recent_epochs: CountOrZero = 0
    """A problem asked within so many epochs is judged by its own answers instead; 0 = never."""


@dataclass(frozen=True)
class ReplayConfig(Section):
    """Rollout replay (DOTS-RR): trains on recent groups again. `sampling.replay = "recent"`."""

    fresh: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.5
    """Share of a step's groups that are sampled; the others come from the buffer."""
    capacity: Count = 512
    """Groups in the buffer."""


@dataclass(frozen=True)
class E3Config(Section):
    """E3: more completions for hard problems (`sampling.budget = "e3"`), and a temperature that
    keeps the entropy (`sampling.thermostat = "e3"`)."""

    spread: Fraction = 0.5
    """Groups have from (1 - spread) to (1 + spread) times group_size completions in the end."""
    spread_step: Fraction = 0.25
    """Growth of the spread per epoch."""
    official: Flag = False
    """Divide the budget as the released code does: a group may exceed the upper bound."""
    length_coef: NonNegative = 0.0
    """mu: a right answer of l tokens to an easy problem earns mu l / (1 + mu l) less; 0 = off."""
    easy_below: Fraction = 0.2
    """Share of the problems that counts as easy."""
    init_steps: Count = 1
    """Steps whose mean entropy is the target."""
    anneal: Fraction = 0.4
    """Last share of the run in which the target falls."""
    anneal_to: Fraction = 0.9
    """Share of the target that is left at the end."""
    lowest: Temperature = 0.3
    """Lowest temperature."""
    highest: Temperature = 2.0
    """Highest temperature."""


@dataclass(frozen=True)
class ShuffleR1Config(Section):
    """Shuffle-R1: pairs of opposite advantages, the telling ones more often.
    `batch.subselect = "shuffle-r1"`."""

    keep: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.5
    """Share of a group's pairs that is kept."""
    rounds: CountOrZero = 8
    """Draws that make up the batch, each without repetition; 0 = every kept pair once."""


@dataclass(frozen=True)
class PodsConfig(Section):
    """PODS: the completions of a group whose rewards vary most. `batch.subselect = "pods"`."""

    keep: Count = 4
    """Completions of a group that are kept."""
    statistics: Literal["kept", "group"] = "kept"
    """Advantages among the kept completions, or within the whole group."""


@dataclass(frozen=True)
class HistoSpecConfig(Section):
    """HistoSpec: decodes several tokens a step if they are those of an earlier answer, and samples
    the same tokens as without. `rollout.drafts = "histospec"`."""

    step_tokens: Count = 192
    """Most tokens of a decode step, drafts included. Up to about so many, a step takes the time of
    reading the weights. A batch of more than a third of it has no drafts."""
    window: Literal["double_halve", "add_reset"] = "double_halve"
    """Length of a draft: 2 to 16, doubled if right, else halved; or 2 to 32, by 2, else back to
    2."""


@dataclass(frozen=True)
class AqnConfig(Section):
    """AQN (QeRL): random weights of the actor's norms. `quant.noise = "aqn"`.

    Its sigma falls geometrically over the run, in stages; the first stage has no noise.
    """

    start: Positive = 1e-2
    """sigma in the second stage; multiplied by quant.update_scale."""
    end: Positive = 1e-4
    """sigma in the last stage."""
    stages: Annotated[int, Field(ge=3, strict=True)] = 10
    """Equal parts of the run."""


@dataclass(frozen=True)
class SystemsConfig(Section):
    """Settings of related systems. Each counts only where a recipe names the system."""

    greso: GresoConfig = field(default_factory=GresoConfig)
    dots: DotsConfig = field(default_factory=DotsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    e3: E3Config = field(default_factory=E3Config)
    shuffle_r1: ShuffleR1Config = field(default_factory=ShuffleR1Config)
    pods: PodsConfig = field(default_factory=PodsConfig)
    histospec: HistoSpecConfig = field(default_factory=HistoSpecConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
