"""Which problems are asked, how often, how warm, and which of the answers are trained on.

`stream` hands problems out and keeps their `history`, `sampler` generates and grades, `narrow`
picks rows of the batch, `age` measures what sampling one step ahead costs. `parts` has the plug
points; each system is one module on them.
"""

from qurl.sampling.built_in import build_hooks
from qurl.sampling.history import History, Outcome
from qurl.sampling.narrow import narrow
from qurl.sampling.parts import Hooks, Setup
from qurl.sampling.sampler import Collected, Sampled, Sampler, collect, has_signal
from qurl.sampling.stream import ProblemStream, Selector, mix, shuffle

__all__ = [
    "Collected",
    "History",
    "Hooks",
    "Outcome",
    "ProblemStream",
    "Sampled",
    "Sampler",
    "Selector",
    "Setup",
    "build_hooks",
    "collect",
    "has_signal",
    "mix",
    "narrow",
    "shuffle",
]
