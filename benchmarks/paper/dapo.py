"""Tables 2 and 4: DAPO with INT8 rollouts, with UAQ and with the equivalent learning rates."""

from __future__ import annotations

from benchmarks.paper.arms import DAPO_UAQ
from benchmarks.paper.page import Claim, accuracy_section

CLAIMS = (
    Claim("UAQ s = 1.5 above no UAQ", "int8-uaq1.5", "int8", 0.62),
    Claim("UAQ s = 1.5 above lr x 1.5 everywhere", "int8-uaq1.5", "int8-lr1.5", 2.19),
    Claim("UAQ s = 1.5 above s = 2", "int8-uaq1.5", "int8-uaq2", 2.10),
    Claim(
        "ours: UAQ equals lr x 1.5 on its layers (true in exact arithmetic)",
        "int8-uaq1.5",
        "int8-layers1.5",
        is_equality=True,
    ),
    Claim("ours: dithered masters above plain INT8", "int8-dither", "int8"),
)

SECTION = accuracy_section(
    DAPO_UAQ, CLAIMS, "paper, AIME24 avg@32", ("groups kept", "sampling/groups_kept_frac")
)
