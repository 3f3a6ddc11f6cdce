"""What trainer and engine share below the models: devices, kernels, rounding, model families."""
