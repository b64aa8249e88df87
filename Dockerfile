# The image of all roles: `docker build -t laminar .`
#
# torch's pinned wheels contain CUDA's libraries, so this image runs on CPUs and on NVIDIA GPUs (the driver comes from the
# machine). Without GPUs `make image-cpu` builds a smaller one, by EXTRA_INDEX=URL and TORCH=torch==VERSION+cpu.
# `--build-arg EXTRAS=vllm` adds an extra of pyproject.toml, `--build-arg JARS=flink` the jars that submit to a Flink.
#
# Pin the base by digest: `--build-arg PYTHON_IMAGE=python@sha256:...`. With wheels in the folder wheelhouse/ the build needs no
# internet: docs/deploy.md, "An image without internet".
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS packages
ARG EXTRAS=""
ARG TORCH=""
ARG EXTRA_INDEX=""
WORKDIR /build
COPY requirements-uv.txt requirements.txt pyproject.toml ./
COPY wheelhouse wheelhouse/
# Packages first: this layer changes only with the requirements. The hashes in requirements.txt are verified.
RUN set -eu; \
    offline=""; [ -z "$(find wheelhouse -name '*.whl')" ] || offline="--no-index --find-links wheelhouse"; \
    [ -z "$TORCH" ] || { sed -i '/^torch==/,/[^\\]$/d' requirements.txt; echo "$TORCH" >> requirements.txt; }; \
    python -m venv /opt/laminar; \
    /opt/laminar/bin/python -m pip install --quiet --no-cache-dir $offline --require-hashes -r requirements-uv.txt; \
    /opt/laminar/bin/uv pip install --quiet --no-cache --python /opt/laminar/bin/python $offline \
        ${EXTRA_INDEX:+--index-strategy unsafe-best-match --extra-index-url "$EXTRA_INDEX"} ${EXTRAS:+--extra "$EXTRAS"} \
        --constraint requirements.txt --requirements pyproject.toml setuptools $TORCH
COPY README.md LICENSE NOTICE ./
COPY schemas schemas
COPY infra infra
COPY operators operators
COPY pipelines pipelines
RUN /opt/laminar/bin/uv pip install --quiet --no-cache --python /opt/laminar/bin/python --no-deps --no-build-isolation . \
    && /opt/laminar/bin/python -m compileall -q /opt/laminar/lib
ARG JARS=""
RUN set -eu; [ ! -d wheelhouse/maven ] || cp -r wheelhouse/maven /opt/laminar/maven; \
    [ -z "$JARS" ] || XDG_CACHE_HOME=/opt/laminar/cache M2_REPO=/opt/laminar/maven \
    /opt/laminar/bin/python -c "from infra.runners.${JARS}_jars import JARS; JARS.class_path(print)"
# What is in the image: the software bill of materials, and every licence.
RUN /opt/laminar/bin/python -m infra.bill_of_materials --installed /opt/laminar

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 laminar && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp laminar
COPY --from=packages /opt/laminar /opt/laminar
ENV PATH=/opt/laminar/bin:$PATH OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 LAMINAR_JARS=/opt/laminar/cache/laminar
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT []
CMD ["laminar", "--help"]
