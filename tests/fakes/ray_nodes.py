"""A cluster of Ray on this machine: one raylet a node, with counted GPUs. ``python -m tests.fakes.ray_nodes``.

It prints the cluster's address, then kills what it reads, a line at a time: the node that holds a process with these
words on its command line, the head for none. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.launch.launchers.ray_cluster import PATIENCE
from tests.fakes.command_line import environment

NODES, CPUS, GPUS = 3, 4, 2


class RayNodes:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith("{")), "")
        assert said, "the cluster of Ray did not start"
        self.address: str = json.loads(said)["address"]

    def kill(self, *, holding: Sequence[str]) -> None:
        """Kill the first node, but that of the head, that has a process whose command line contains ``holding``."""
        self._ask(holding)

    def kill_head(self) -> None:
        """Its GCS: the process that all others ask."""
        self._ask([])

    def _ask(self, holding: Sequence[str]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(holding) + "\n")
        self._process.stdin.flush()
        said = next(self._process.stdout, "")
        assert said.startswith("killed"), said


@contextlib.contextmanager
def ray_nodes(directory: Path) -> Iterator[RayNodes]:
    with (directory / "ray.log").open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.ray_nodes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
            env=environment(PATIENCE),
            start_new_session=True,
        )
    with process:  # closes its pipes
        try:
            yield RayNodes(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _main() -> None:
    import psutil
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "num_gpus": 0})
    nodes = [cluster.add_node(num_cpus=CPUS, num_gpus=GPUS) for _ in range(NODES - 1)]
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        holding = json.loads(line)
        if not holding:
            cluster.head_node.kill_gcs_server(check_alive=False)
            print("killed", flush=True)
            continue
        for node in nodes:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            below = [" ".join(child.cmdline()) for child in raylet.children(recursive=True) if child.is_running()]
            if any(all(word in command for word in holding) for command in below):
                nodes.remove(node)
                cluster.remove_node(node, allow_graceful=False)
                print("killed", flush=True)
                break
        else:
            print(f"no node has {holding}", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _main()
