"""A call of `train` until its process is set up for TensorFlow, which must not be imported before:
the chief plans the run, and the other workers get its plan."""

import os
from pathlib import Path
from typing import Any, Dict

from cpu3d.data.store import open_store
from cpu3d.distributed.all_reduce import ALONE, Exchange, join
from cpu3d.distributed.cluster import read_cluster
from cpu3d.distributed.rendezvous import plan_of_chief
from cpu3d.errors import WorkerLostError
from cpu3d.host.apply import engine_name, set_up
from cpu3d.host.gpu import HostGpus
from cpu3d.host.thread_plan import ThreadPlan, host_share
from cpu3d.plan import Plan, make_plan
from cpu3d.plan_text import check_run, plan_lines
from cpu3d.util.progress import say
from cpu3d.util.records import VERSION
from memory_estimator.host import read_host
from models.native.library import native_operations


class Call:
    """A call of `train` by one worker of a run."""

    plan: Plan  # of a worker that is not the chief, once it has joined
    threads: ThreadPlan  # of this process, once it has joined
    engine_name: str  # so too, as of `host.apply.engine_name`

    def __init__(self, store_folder: Path, folder: Path, settings: Dict[str, Any], *, force: bool):
        self.folder = folder
        self.settings = settings
        self.force = force
        self.cluster = read_cluster(os.environ)
        self.store = open_store(store_folder)
        self.host = host_share(read_host(), len(self.cluster.local_ranks))
        self.gpus = HostGpus()
        self.device = "cpu"

    def make_plan(self) -> None:
        """Plan the run."""
        self.plan = make_plan(
            self.store,
            self.folder,
            self.host,
            self.settings,
            gpus=self.gpus,
            workers=self.cluster.workers,
            force=self.force,
        )

    def decide(self) -> None:
        """Plan the run, and refuse a new one that may not fit. The chief alone does it."""
        if self.cluster.is_chief:
            self.make_plan()
            say(*plan_lines(self.plan, self.host))
            self.device = self.plan.config.device
            if not self.plan.continues:
                self.refuse_what_does_not_fit()

    def join(self) -> Exchange:
        """Set up this process for TensorFlow, meet the other workers, and take the chief's plan."""
        cluster = self.cluster
        place = (cluster.local_index, len(cluster.local_ranks))
        _, self.threads, tf = set_up(device=self.device, local=place)
        self.engine_name = engine_name(tf)
        # Each worker updates its weights itself, with the rounding of these operations.
        kind = native_operations().float32 or "no"
        engine = f"cpu3d {VERSION}, {self.engine_name}, {kind} operations"
        if not cluster.is_chief:
            exchange = join(cluster, say=say)
            self.plan = plan_of_chief(exchange.plan, self.store, self.host, engine)
            return exchange
        try:
            return join(cluster, plan={**self.plan.to_json(), "engine_name": engine}, say=say)
        except WorkerLostError:
            # After its last step the other workers are done and are not started again; what is left
            # of the run is the chief's alone.
            if self.plan.done < self.plan.steps:
                raise
            return ALONE

    def refuse_what_does_not_fit(self) -> None:
        """Raise DoesNotFitError if the plan may not fit, unless `force`."""
        if not self.force:
            check_run(self.plan, self.host, self.gpus)
