"""Everything around the loop: run directory, checkpoints, assembly, evaluation, export, report."""
