"""TIS and ACR in settings with a large mismatch or a large learning rate."""

from __future__ import annotations

from benchmarks.paper.arms import LONG_HORIZON
from benchmarks.paper.figures_2_3 import mismatch_table
from benchmarks.paper.page import Claim, accuracy_section

CLAIMS = (
    Claim("INT8, lr 1e-5: ACR above TIS", "int8-acr-lr1e-5", "int8-tis-lr1e-5"),
    Claim("INT8, lr 1e-5: ACR above no correction", "int8-acr-lr1e-5", "int8-ppo_prox-lr1e-5"),
    Claim("lr 1e-5: BF16 above INT8 with ACR", "bf16-lr1e-5", "int8-acr-lr1e-5"),
    Claim("INT6: TIS above no correction", "int6-tis", "int6-ppo_prox"),
    Claim("INT6: ACR above TIS", "int6-acr", "int6-tis"),
)

SECTION = accuracy_section(
    LONG_HORIZON,
    CLAIMS,
    "paper",
    ("KL(behav || prox) per token", "rollout_corr/kl"),
    more_tables=[mismatch_table],
)
