# Written by `nox -s fix` from tools/images/Dockerfile.in; do not edit.
# docker build --file tools/images/py3.13-torch2.14-cpu.Dockerfile --tag composer:py3.13-torch2.14-cpu .
FROM python:3.13-slim-bookworm AS wheels
RUN python -m pip install --no-cache-dir uv==0.13.8
WORKDIR /source
COPY packages packages
COPY tools tools
COPY pyproject.toml ./
RUN for package in packages/*/; do \
        uv build --quiet --wheel --build-constraints tools/constraints/pinned.txt --out-dir /wheels "$package" || exit 1; \
    done

FROM python:3.13-slim-bookworm
# torch.compile needs a compiler. CUDA comes with torch; the host needs NVIDIA's driver and container toolkit only.
# Debian keeps one version of a package, so none is named.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install --no-cache-dir uv==0.13.8 \
    && useradd --uid 1000 --create-home composer
ENV VIRTUAL_ENV=/opt/composer PATH=/opt/composer/bin:$PATH UV_NO_CACHE=1
RUN uv venv --quiet "$VIRTUAL_ENV" \
    && uv pip install --quiet --index-url https://download.pytorch.org/whl/cpu \
        torch==2.14.1 torchvision==0.29.1
COPY tools/constraints/pinned.txt /tmp/pinned.txt
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    grep --extended-regexp --invert-match '^(torch|torchvision|triton|sympy|cuda-.*|nvidia-.*)==' /tmp/pinned.txt > /tmp/constraints.txt \
    && printf 'torch==%s\ntorchvision==%s\n' 2.14.1 0.29.1 >> /tmp/constraints.txt \
    && uv pip install --quiet --constraint /tmp/constraints.txt /wheels/*.whl \
    && rm /tmp/pinned.txt /tmp/constraints.txt
USER 1000
WORKDIR /home/composer
RUN python -c "from composer import Trainer; from composer.algorithms import MixUp"
CMD ["python"]
