# Two images, without root and without a compiler; apptainer.def has the steps of the first.
#   docker build -t cpu3d .                    for CPUs, 1.4 GB
#   docker build -t cpu3d:gpu --target gpu .   with CUDA; not tried
# The commands of the program work but two: `export --format onnx` and `train --mlflow` need packages
# that are left out.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY requirements*.txt ./
# The pins are those of ./run.sh, less what a training does not use.
RUN python -m venv /opt/cpu3d && sed -i '/^# --- Tests/,$d; /^onnx/d' requirements*.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY models models
COPY memory_estimator memory_estimator
COPY cpu3d cpu3d

FROM build AS build-gpu
RUN /opt/cpu3d/bin/pip install --no-cache-dir -r requirements-gpu.txt
RUN /opt/cpu3d/bin/pip install --no-cache-dir --no-deps .

FROM build AS build-cpu
# tensorflow-cpu is TensorFlow without its 370 MB for GPUs. Intel's extension is left out, 380 MB:
# with the operations in C both engines are equally fast. Headers and libclang (64 MB), which it asks
# for and never imports, are for compilers.
RUN sed -i '/^intel/d; s/^tensorflow==/tensorflow-cpu==/' requirements.txt \
 && /opt/cpu3d/bin/pip install --no-cache-dir -r requirements.txt \
 && rm -r /opt/cpu3d/lib/python3.11/site-packages/tensorflow/include
RUN /opt/cpu3d/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/cpu3d/bin/pip uninstall -y libclang pip \
 && strip --strip-unneeded /opt/cpu3d/lib/python3.11/site-packages/tensorflow/libtensorflow_cc.so.2

FROM ${BASE} AS runtime
# What is kept for a user, such as the speed of this host, lies in the folder that is mounted.
ENV PATH=/opt/cpu3d/bin:$PATH HOME=/work
# Any other user will do: nothing is written outside of it.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["cpu3d"]

FROM runtime AS gpu
COPY --from=build-gpu /opt/cpu3d /opt/cpu3d

FROM runtime AS cpu
COPY --from=build-cpu /opt/cpu3d /opt/cpu3d
