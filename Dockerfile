# QuRL for machines with NVIDIA GPUs: docker build -t qurl .
# The versions are those of requirements/gpu-py312.txt. Triton compiles kernels when they are first
# used and needs a C compiler, which the devel image has. See docs/nodes.md.
FROM pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel

ARG EXTRAS=data,gguf,ray,tensorboard,wandb
# Ray must be of one version on all machines; its extra takes the jobs of deploy/rayjob.yaml.
ARG RAY=ray[default]==2.60.0

# This Python is the image's own, and the image holds nothing else.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /qurl
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY recipes recipes
COPY src src
RUN python -m pip install -c requirements/gpu-py312.txt ".[${EXTRAS}]" "${RAY}" \
 && qurl --version

CMD ["qurl", "doctor"]
