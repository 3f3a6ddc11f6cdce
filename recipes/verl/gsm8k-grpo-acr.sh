#!/usr/bin/env bash
# GSM8K with GRPO and ACR in verl 0.9, rollouts in FP8, on one node with eight GPUs.
#
#   recipes/verl/gsm8k-grpo-acr.sh [key=value ...]
#
# MODEL is a folder or a hub name. DATA holds train.parquet and test.parquet as verl's
# examples/data_preprocess/gsm8k.py writes them. Any key of verl can follow, such as
# actor_rollout_ref.actor.policy_loss.cap=4 or actor_rollout_ref.rollout.quantization=null.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

correction=(
  "hydra.searchpath=[pkg://qurl.integrations.verl]"
  +qurl=acr
  actor_rollout_ref.rollout.quantization=fp8
)

# Four mini-batches per batch: with one, pi = pi_prox in every update, and acr is tis.
training=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  data.train_batch_size=256
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.clip_ratio_low=0.2
  actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.loss_agg_mode=token-mean
  actor_rollout_ref.actor.use_kl_loss=False
  actor_rollout_ref.actor.entropy_coeff=0
)

rollouts=(
  "data.train_files=$DATA/train.parquet"
  "data.val_files=$DATA/test.parquet"
  data.max_prompt_length=512
  data.max_response_length=1024
  "actor_rollout_ref.model.path=$MODEL"
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.temperature=1.0
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
)

run=(
  trainer.n_gpus_per_node=8
  trainer.nnodes=1
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=50
  trainer.project_name=qurl
  trainer.experiment_name=gsm8k-grpo-acr
  "trainer.logger=[console]"
)

exec python -m verl.trainer.main_ppo \
  "${correction[@]}" "${training[@]}" "${rollouts[@]}" "${run[@]}" "$@"
