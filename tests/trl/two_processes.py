"""One of the processes of `test_two_processes`: python -m torch.distributed.run ... FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from trl import GRPOTrainer

from qurl.integrations.trl import QurlGRPOTrainer, QurlOptions
from tests.trl.toy import trainer


class Recorded(QurlGRPOTrainer):
    """Keeps what was sampled, and both losses of every micro-batch."""

    def __init__(self, *args, **kwargs):
        self.sampled, self.losses = [], []
        super().__init__(*args, **kwargs)

    def _roll_out(self, prompts, trainer):
        found = super()._roll_out(prompts, trainer)
        self.sampled += zip(prompts, found["completion_ids"], strict=True)
        return found

    def _compute_loss(self, model, inputs):
        with torch.no_grad():
            theirs = GRPOTrainer._compute_loss(self, model, inputs)
        ours = super()._compute_loss(model, inputs)
        self.losses.append((ours.item(), theirs.item()))
        return ours


def run(folder: Path, objective: str) -> None:
    settings = {"per_device_train_batch_size": 3, "num_generations": 8}
    options = QurlOptions(objective=objective, update_scale=2.0)
    made = trainer(folder / "run", Recorded, options, **settings)
    made.train()
    made.save_model(str(folder / "saved"))
    found = {
        "sampled": made.sampled,
        "losses": made.losses,
        "log": [row for row in made.state.log_history if "loss" in row],
        "weights": [p.double().sum().item() for p in made.model.parameters()],
        "num_processes": made.accelerator.num_processes,
    }
    (folder / f"{objective}-{made.accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("ppo_prox", "acr"):
        run(Path(sys.argv[1]), name)
    torch.distributed.destroy_process_group()
