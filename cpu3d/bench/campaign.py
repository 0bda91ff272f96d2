"""What `bench validate` measures: configurations far apart in everything that memory and time depend on.

A fraction of all combinations, chosen by machine so that nearly every two settings meet somewhere and each fits a host
with 24 GB of memory. About 600 steps in all; cheap ones come first, and those of a policy other than speed last.
"""

from typing import List, Tuple

from memory_estimator.job import Job
from models.config import POLICIES, UNetConfig

HELD_OUT = """
128x128x128 f8  d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f8  d5 b1 c4 k3 float32  stock instance adam
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance sgd  residual
128x128x128 f16 d5 b1 c4 k3 bfloat16 stock instance adam
144x176x128 f16 d5 b1 c4 k3 bfloat16 itex  batch    adam
144x144x144 f8  d4 b3 c1 k1 bfloat16 itex  none     adam deep
240x240x160 f8  d5 b1 c4 k3 bfloat16 itex  instance adam
160x192x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam
128x128x128 f16 d5 b1 c4 k3 float32  stock instance adam
128x128x128 f16 d5 b2 c4 k3 bfloat16 itex  instance adam
176x208x144 f8  d5 b1 c1 k1 float32  stock none     sgd  residual
240x240x160 f8  d5 b1 c4 k3 bfloat16 stock instance adam
176x208x144 f8  d3 b3 c1 k1 bfloat16 itex  batch    sgd  upsampling
144x144x144 f24 d3 b1 c1 k1 bfloat16 itex  instance adam upsampling
128x128x160 f24 d4 b1 c1 k1 bfloat16 itex  instance sgd  upsampling
240x240x144 f8  d3 b1 c4 k3 float32  stock none     sgd  residual
144x144x144 f16 d5 b1 c1 k1 float32  stock none     sgd  residual
128x128x160 f24 d5 b1 c1 k1 bfloat16 itex  none     sgd  residual
160x192x128 f8  d4 b2 c1 k1 float32  stock batch    sgd  residual
128x128x128 f32 d3 b1 c1 k1 bfloat16 itex  none     sgd  upsampling
144x176x128 f8  d3 b4 c4 k1 bfloat16 stock none     sgd  deep
192x192x128 f8  d3 b2 c1 k3 float32  stock none     sgd  upsampling
192x192x128 f16 d5 b1 c1 k1 bfloat16 stock batch    adam deep
240x240x144 f8  d4 b1 c1 k1 float32  itex  batch    adam
144x176x128 f16 d5 b1 c4 k3 float32  itex  instance adam
176x208x144 f16 d4 b1 c1 k1 bfloat16 stock none     adam upsampling
160x192x128 f8  d5 b3 c1 k1 bfloat16 stock none     adam deep
128x128x160 f16 d3 b3 c4 k1 bfloat16 itex  batch    sgd
128x128x160 f24 d3 b1 c4 k3 bfloat16 stock instance sgd  residual
160x192x128 f8  d5 b4 c4 k1 bfloat16 itex  none     adam upsampling
128x128x128 f8  d4 b4 c4 k3 float32  stock instance sgd  residual
144x176x128 f8  d3 b3 c4 k3 float32  stock instance sgd  deep
240x240x144 f16 d3 b1 c1 k3 bfloat16 itex  instance adam deep
144x176x128 f24 d4 b1 c1 k3 bfloat16 itex  none     adam
144x144x144 f8  d4 b1 c4 k3 bfloat16 stock batch    sgd  cicek2016
144x176x128 f8  d3 b3 c4 k3 float32  itex  instance sgd  residual
192x192x128 f8  d3 b4 c4 k3 bfloat16 itex  none     adam residual
192x192x128 f8  d3 b1 c4 k1 bfloat16 itex  instance sgd  cicek2016
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  none     sgd  deep
144x176x128 f16 d3 b2 c4 k1 bfloat16 stock none     adam upsampling
128x128x160 f8  d3 b4 c1 k1 float32  itex  batch    adam residual
128x128x128 f32 d4 b1 c4 k3 bfloat16 itex  batch    adam deep
240x240x160 f8  d4 b1 c4 k1 float32  stock none     adam deep
240x240x160 f8  d4 b1 c4 k3 float32  stock instance adam
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  batch    adam residual
176x208x144 f8  d3 b4 c1 k3 bfloat16 itex  none     sgd
176x208x144 f8  d3 b2 c4 k1 float32  itex  instance sgd  deep
160x192x128 f24 d3 b1 c4 k3 bfloat16 itex  none     adam deep
128x128x160 f24 d4 b1 c1 k3 bfloat16 stock batch    adam deep
128x128x128 f24 d3 b1 c1 k3 float32  stock batch    sgd  upsampling
192x192x128 f8  d4 b3 c1 k3 bfloat16 stock none     adam
144x144x144 f16 d4 b2 c1 k3 bfloat16 stock instance adam
144x144x144 f24 d3 b1 c1 k3 bfloat16 stock instance adam residual
128x128x160 f8  d3 b1 c1 k1 float32  itex  none     adam cicek2016
128x128x128 f8  d5 b2 c1 k1 bfloat16 itex  none     adam cicek2016
128x128x128 f24 d3 b2 c1 k3 bfloat16 itex  batch    adam upsampling
128x128x128 f32 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x160 f32 d3 b1 c1 k3 bfloat16 itex  batch    sgd  upsampling
144x144x144 f8  d3 b4 c1 k1 float32  itex  none     sgd  upsampling
128x128x128 f16 d4 b3 c4 k1 bfloat16 stock none     adam deep
128x128x160 f16 d3 b2 c1 k3 float32  stock batch    adam upsampling
128x128x128 f32 d3 b1 c1 k1 bfloat16 stock instance sgd
144x144x144 f32 d3 b1 c1 k1 bfloat16 itex  instance sgd
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam
128x128x128 f32 d3 b1 c1 k1 float32  itex  none     adam upsampling
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f16 d5 b1 c4 k3 bfloat16 stock instance adam lean
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam balanced
128x128x128 f16 d5 b1 c4 k3 float32  itex  instance adam lean
128x128x128 f16 d5 b1 c4 k3 float32  stock instance adam lean
128x128x128 f16 d5 b2/1 c4 k3 bfloat16 itex  instance adam
128x128x128 f16 d5 b4/1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f16 d5 b4/2 c4 k3 bfloat16 itex  batch    adam balanced
128x128x128 f16 d5 b1 c4 k3 bfloat16 itex  instance sgd  residual lean
144x176x128 f16 d5 b1 c4 k3 bfloat16 itex  batch    adam lean
160x192x128 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
144x144x144 f24 d3 b1 c1 k1 bfloat16 itex  instance adam upsampling lean
128x128x160 f24 d4 b1 c1 k1 bfloat16 itex  instance sgd  upsampling balanced
128x128x160 f24 d5 b1 c1 k1 bfloat16 itex  none     sgd  residual balanced
144x144x144 f16 d5 b1 c1 k1 float32  stock none     sgd  residual lean
144x176x128 f8  d3 b4 c4 k1 bfloat16 stock none     sgd  balanced
192x192x128 f8  d3 b1 c4 k1 bfloat16 itex  instance sgd  cicek2016 lean
144x144x144 f8  d4 b1 c4 k3 bfloat16 stock batch    sgd  cicek2016 balanced
128x128x128 f32 d4 b1 c1 k3 bfloat16 itex  none     sgd  deep lean
240x240x144 f16 d3 b1 c1 k3 bfloat16 itex  instance adam deep balanced
128x128x128 f24 d3 b2 c1 k3 bfloat16 itex  batch    adam upsampling lean
240x240x144 f8  d4 b1 c1 k1 float32  itex  batch    adam lean
176x208x144 f16 d4 b1 c1 k1 bfloat16 stock none     adam upsampling lean
160x192x128 f8  d4 b2/1 c1 k1 float32  stock batch    sgd  residual balanced
240x240x160 f8  d5 b1 c4 k3 bfloat16 itex  instance adam lean
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
240x240x160 f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
128x128x128 f32 d5 b1 c4 k3 bfloat16 itex  instance adam lean
"""
"""128^3 voxels and above: no constant may be fitted to these. Columns: shape, filters, depth, batch, channels, outputs
(k), dtype, engine, norm, optimizer, what else differs from the default network, policy. b4 computes a batch of 4 at
once, b4/1 one at a time."""

FITTED = """
64x64x64    f16 d5 b1 c4 k3 bfloat16 itex  instance adam
64x64x64    f16 d5 b1 c4 k3 float32  itex  instance adam
64x64x64    f16 d5 b1 c4 k3 bfloat16 stock instance adam
64x64x64    f16 d5 b1 c4 k3 float32  stock instance adam
80x96x64    f32 d4 b1 c1 k1 bfloat16 itex  none     sgd  upsampling
80x96x64    f32 d4 b1 c1 k1 float32  stock batch    sgd  residual
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam
96x96x96    f16 d5 b1 c4 k3 float32  itex  instance adam
96x96x96    f16 d5 b1 c4 k3 bfloat16 stock instance adam
96x96x96    f16 d5 b1 c4 k3 float32  stock instance adam
96x96x96    f8  d3 b2 c1 k3 bfloat16 itex  batch    sgd  cicek2016
96x96x96    f32 d4 b1 c1 k1 bfloat16 itex  none     adam deep
96x96x96    f8  d3 b4 c4 k1 float32  stock none     adam residual
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam balanced
96x96x96    f16 d5 b1 c4 k3 bfloat16 itex  instance adam lean
96x96x96    f16 d5 b1 c4 k3 float32  stock instance adam lean
"""
"""96^3 voxels and below, the same columns: what constants may be fitted to."""

VARIANTS = {
    "": {},
    "cicek2016": {"network": "cicek2016"},
    "residual": {"residual": True},
    "upsampling": {"up": "upsampling"},
    "deep": {"deep_supervision": True},
}


def configurations(threads: int) -> Tuple[Job, ...]:
    """Every job to measure on a host with so many threads, in order; the held-out ones first."""
    return tuple(_job(line, threads) for table in (HELD_OUT, FITTED) for line in table.split("\n") if line)


def describe(job: Job) -> str:
    """A job as a line of the tables above, in words: "128x128x128 f16 d5 b1 c4 k3 bfloat16 itex instance adam"."""
    unet = job.unet
    words: List[str] = ["x".join(map(str, job.shape)), f"f{unet.filters}", f"d{unet.depth}"]
    words.append(f"b{job.batch}" if job.parts == 1 else f"b{job.batch}/{job.micro}")
    words += [f"c{unet.channels}", f"k{unet.outputs}", unet.dtype, job.engine, unet.norm, job.optimizer]
    words += [
        name for name, more in VARIANTS.items() if more and all(getattr(unet, key) == of for key, of in more.items())
    ]
    words += [unet.policy] if unet.policy != "speed" else []
    return " ".join(words)


# --- Private helpers ---


def _job(line: str, threads: int) -> Job:
    shape, filters, depth, batch, channels, outputs, dtype, engine, norm, optimizer, *more = line.split()
    unet = UNetConfig(
        channels=int(channels[1:]),
        outputs=int(outputs[1:]),
        filters=int(filters[1:]),
        depth=int(depth[1:]),
        norm=norm,
        dtype=dtype,
        policy=next((word for word in more if word in POLICIES), "speed"),
        **VARIANTS[next((word for word in more if word in VARIANTS), "")],
    )
    grid = tuple(int(side) for side in shape.split("x"))
    whole, _, micro = batch[1:].partition("/")
    # Canonical, as `memory_estimator.validation` has what was measured of the list.
    return Job(unet, grid, int(whole), int(micro or whole), optimizer, engine, threads=threads).canonical
