"""Table 1: PPO on GSM8K with BF16, INT8 and FP8 rollouts, by objective."""

from __future__ import annotations

from benchmarks.paper.arms import TABLE_1
from benchmarks.paper.page import Claim, accuracy_section

CLAIMS = (
    Claim("INT8: TIS above no correction", "int8-tis", "int8-ppo_prox", 2.62),
    Claim("INT8: ACR above no correction", "int8-acr", "int8-ppo_prox", 4.77),
    Claim("INT8: ACR above TIS", "int8-acr", "int8-tis", 2.15),
    Claim("BF16 above INT8 with TIS", "bf16", "int8-tis", 3.95),
    Claim("BF16 above INT8 with ACR", "bf16", "int8-acr", 1.80),
    Claim("FP8: TIS above no correction", "fp8-tis", "fp8-ppo_prox", 53.60),
    Claim("FP8: ACR above TIS", "fp8-acr", "fp8-tis", 0.68),
    Claim("BF16 above FP8 with ACR", "bf16", "fp8-acr", 1.07),
)

SECTION = accuracy_section(
    TABLE_1, CLAIMS, "paper, step 435", ("tokens per rollout", "response_length/mean")
)
