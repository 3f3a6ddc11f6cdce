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
    """GRESO: skips problems whose last answers were all right or all wrong. Turn it on with
    `sampling.select = "greso"`.

    P(skip) = 1 - max(p^z, explore) after z such groups in a row.
    """

    p: Fraction = 0.5
    """Initial value of p, for easy and for hard problems."""
    step: Fraction = 0.01
    """How much p changes after each step from the second epoch on, to approach the targets."""
    easy_target: Fraction = 0.25 / 3
    """Target share of groups that are all right; p of easy problems adapts to reach it."""
    hard_target: Fraction = 0.5 / 3
    """Target share of groups that are all wrong; p of hard problems adapts to reach it."""
    explore: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.01
    """Smallest probability that a problem is asked."""
    easy_above: Fraction = 0.98
    """A group of equal answers with at least this accuracy counts as all right."""
    hard_below: Fraction = 0.11
    """A group of equal answers with at most this accuracy counts as all wrong."""


@dataclass(frozen=True)
class DotsConfig(Section):
    """DOTS: asks problems whose predicted difficulty is medium. Turn it on with
    `sampling.select = "dots"`.

    P(problem) ~ exp(-|predicted accuracy - target| / sharpness).
    """

    every: Count = 2
    """Steps between predictions."""
    references: CountOrZero = 256
    """Problems that are answered before each prediction and not trained on; 0 = use the history."""
    target: Fraction = 0.5
    """Prefer problems with this predicted accuracy."""
    sharpness: Positive = 1e-3
    """Small values allow only problems near the target; large values allow any problem."""
    encoder: FilePath = ""
    """Model that embeds questions (mean of its last hidden states); empty = bags of tokens."""
    predictor: FilePath = ""
    """Trained predictor (`qurl.sampling.predictor`); empty = attention over the embeddings."""
    calibrate: Flag = True
    """Fit predictions to the references by least squares; each reference is predicted from the
    others."""
    recent_epochs: CountOrZero = 0
    """For a problem asked within this many epochs, use its own answers instead of the prediction;
    0 = never."""


@dataclass(frozen=True)
class ReplayConfig(Section):
    """Rollout replay (DOTS-RR): trains on recent groups again. Turn it on with
    `sampling.replay = "recent"`."""

    fresh: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.5
    """Share of a step's groups that are sampled; the others come from the buffer."""
    capacity: Count = 512
    """Groups in the buffer."""


@dataclass(frozen=True)
class E3Config(Section):
    """E3: gives hard problems more completions (`sampling.budget = "e3"`), and adapts the
    temperature to keep the entropy (`sampling.thermostat = "e3"`)."""

    spread: Fraction = 0.5
    """Final range of group sizes: (1 - spread) to (1 + spread) times group_size."""
    spread_step: Fraction = 0.25
    """How much the range widens per epoch, until it reaches spread."""
    official: Flag = False
    """Divide the budget as the released code does, where a group may exceed the upper bound."""
    length_coef: NonNegative = 0.0
    """mu: a right answer of l tokens to an easy problem loses mu l / (1 + mu l) of reward;
    0 = off."""
    easy_below: Fraction = 0.2
    """This share of the problems, those with the highest accuracy, counts as easy."""
    init_steps: Count = 1
    """The target is the mean entropy of this many first steps."""
    anneal: Fraction = 0.4
    """The target falls during this last share of the run."""
    anneal_to: Fraction = 0.9
    """At the end of the run, the target is this share of its first value."""
    lowest: Temperature = 0.3
    """Lowest temperature."""
    highest: Temperature = 2.0
    """Highest temperature."""


@dataclass(frozen=True)
class ShuffleR1Config(Section):
    """Shuffle-R1: trains on pairs of opposite advantages, and repeats the most informative pairs.
    Turn it on with `batch.subselect = "shuffle-r1"`."""

    keep: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.5
    """Keep this share of a group's pairs."""
    rounds: CountOrZero = 8
    """Number of draws that make up the batch, each without repetition; 0 = take every kept pair
    once."""


@dataclass(frozen=True)
class PodsConfig(Section):
    """PODS: trains on the completions of a group whose rewards vary most. Turn it on with
    `batch.subselect = "pods"`."""

    keep: Count = 4
    """Number of completions to keep of each group."""
    statistics: Literal["kept", "group"] = "kept"
    """Compute advantages among the kept completions, or within the whole group."""


@dataclass(frozen=True)
class HistoSpecConfig(Section):
    """HistoSpec: decodes several tokens per step if they agree with an earlier answer. It samples
    the same tokens as without drafts. Turn it on with `rollout.drafts = "histospec"` and
    `sampling.keep_responses = true`."""

    step_tokens: Count = 192
    """Largest number of tokens in a decode step, drafts included. Up to about this number, a step
    takes as long as reading the weights. A batch of more than a third of it gets no drafts."""
    window: Literal["double_halve", "add_reset"] = "double_halve"
    """How the length of a draft adapts. double_halve: 2 to 16 tokens; doubles if the draft was
    right, else halves. add_reset: 2 to 32 tokens; grows by 2 if the draft was right, else
    returns to 2."""


@dataclass(frozen=True)
class AqnConfig(Section):
    """AQN (QeRL): adds random noise to the weights of the actor's norms. Turn it on with
    `quant.noise = "aqn"`.

    sigma, the size of the noise, falls geometrically over the run, in stages. The first stage has
    no noise.
    """

    start: Positive = 1e-2
    """sigma in the second stage; multiplied by quant.update_scale."""
    end: Positive = 1e-4
    """sigma in the last stage."""
    stages: Annotated[int, Field(ge=3, strict=True)] = 10
    """Number of stages, which are equal parts of the run."""


@dataclass(frozen=True)
class SystemsConfig(Section):
    """Settings of related systems. They apply only if the recipe turns the system on."""

    greso: GresoConfig = field(default_factory=GresoConfig)
    dots: DotsConfig = field(default_factory=DotsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    e3: E3Config = field(default_factory=E3Config)
    shuffle_r1: ShuffleR1Config = field(default_factory=ShuffleR1Config)
    pods: PodsConfig = field(default_factory=PodsConfig)
    histospec: HistoSpecConfig = field(default_factory=HistoSpecConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
