"""Sections of accuracies and claims: Table 1, Tables 2 and 4, GRPO, large mismatch or rates."""

from __future__ import annotations

from benchmarks.paper.arms import (
    DAPO_CORRECTION,
    DAPO_UAQ,
    GRPO_RATE,
    JET_RL,
    LONG_HORIZON,
    LOW_RATE,
    MATH,
    TABLE_1,
)
from benchmarks.paper.figures_2_3 import mismatch_table
from benchmarks.paper.page import Claim, accuracy_section

PPO = accuracy_section(
    TABLE_1,
    (
        Claim("INT8: TIS above no correction", "int8-tis", "int8-ppo_prox", 2.62),
        Claim("INT8: ACR above no correction", "int8-acr", "int8-ppo_prox", 4.77),
        Claim("INT8: ACR above TIS", "int8-acr", "int8-tis", 2.15),
        Claim("BF16 above INT8 with TIS", "bf16", "int8-tis", 3.95),
        Claim("BF16 above INT8 with ACR", "bf16", "int8-acr", 1.80),
        Claim("FP8: TIS above no correction", "fp8-tis", "fp8-ppo_prox", 53.60),
        Claim("FP8: ACR above TIS", "fp8-acr", "fp8-tis", 0.68),
        Claim("BF16 above FP8 with ACR", "bf16", "fp8-acr", 1.07),
    ),
    "paper, step 435",
    ("tokens per rollout", "response_length/mean"),
)
DAPO = accuracy_section(
    DAPO_UAQ,
    (
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
    ),
    "paper, AIME24 avg@32",
    ("groups kept", "sampling/groups_kept_frac"),
)
SIGNED_DAPO = accuracy_section(
    DAPO_CORRECTION,
    (
        Claim("INT8: TIS above no correction", "int8-tis", "int8-ppo_prox", 30.29),
        Claim("INT8: ACR above TIS", "int8-acr", "int8-tis", 0.34),
        Claim("BF16 above INT8 with ACR", "bf16", "int8-acr", 1.04),
        Claim("FP8: TIS above no correction", "fp8-tis", "fp8-ppo_prox", 32.60),
        Claim("INT8, lr 3e-6: TIS above none", "int8-tis-lr3e-6", "int8-ppo_prox-lr3e-6"),
    ),
    "paper, AIME24 avg@32",
    ("groups kept", "sampling/groups_kept_frac"),
    more_tables=[mismatch_table],
)
GRPO = accuracy_section(
    JET_RL,
    (
        Claim("FP8: one flow above uncorrected rollouts", "fp8-unified", "fp8-ppo_prox"),
        Claim("BF16 above one FP8 flow", "bf16", "fp8-unified"),
        Claim("BF16 above uncorrected FP8 rollouts", "bf16", "fp8-ppo_prox"),
        Claim("8-bit moments equal FP32 moments", "bf16-8bit", "bf16", is_equality=True),
        Claim("INT8: TIS above no correction", "int8-tis", "int8-ppo_prox"),
    ),
    "paper",
    ("KL(behav || prox) per token", "rollout_corr/kl"),
    more_tables=[mismatch_table],
)
GRPO_AT_3E_6 = accuracy_section(
    GRPO_RATE,
    (Claim("INT8, lr 3e-6: TIS above no correction", "int8-tis", "int8-ppo_prox"),),
    "paper",
    ("KL(behav || prox) per token", "rollout_corr/kl"),
    more_tables=[mismatch_table],
)
SLOW = accuracy_section(
    LOW_RATE,
    (
        Claim("INT8, lr 1e-6: TIS above no correction", "int8-tis-lr1e-6", "int8-ppo_prox-lr1e-6"),
        Claim("INT8, lr 1e-6: ACR above TIS", "int8-acr-lr1e-6", "int8-tis-lr1e-6"),
        Claim("lr 1e-6: BF16 above INT8 with TIS", "bf16-lr1e-6", "int8-tis-lr1e-6"),
    ),
    "paper",
    ("tokens per rollout", "response_length/mean"),
)
FAR = accuracy_section(
    LONG_HORIZON,
    (
        Claim("INT8, lr 1e-5: ACR above TIS", "int8-acr-lr1e-5", "int8-tis-lr1e-5"),
        Claim("INT8, lr 1e-5: ACR above no correction", "int8-acr-lr1e-5", "int8-ppo_prox-lr1e-5"),
        Claim("lr 1e-5: BF16 above INT8 with ACR", "bf16-lr1e-5", "int8-acr-lr1e-5"),
        Claim("INT6: TIS above no correction", "int6-tis", "int6-ppo_prox"),
        Claim("INT6: ACR above TIS", "int6-acr", "int6-tis"),
    ),
    "paper",
    ("KL(behav || prox) per token", "rollout_corr/kl"),
    more_tables=[mismatch_table],
)
HARD = accuracy_section(
    MATH,
    (
        Claim("BF16 equals INT8 with FP8 KV and ACR", "bf16", "int8-kv-acr", is_equality=True),
        Claim("BF16 equals one FP8 flow", "bf16", "fp8-unified", is_equality=True),
    ),
    "paper",
    ("tokens per rollout", "response_length/mean"),
    more_tables=[mismatch_table],
)
