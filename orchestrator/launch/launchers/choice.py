"""Which launcher a run's settings name; an engine's own library is imported only where it is chosen."""

from __future__ import annotations

import os
from collections.abc import Collection

from orchestrator.config.run_directory import RunDir
from orchestrator.launch.launchers.base import Launcher
from orchestrator.launch.launchers.local import LocalLauncher
from transport.contracts.settings import Settings


def open_launcher(settings: Settings, rundir: RunDir, begun: Collection[str]) -> Launcher:
    """Nothing is started or asked yet. begun: names of the workers that the run begins with.

    Raises ConfigError where this machine has not what the engine needs: a library, programs, an image."""
    match settings.launcher.kind:
        case "local":
            return LocalLauncher()
        case "slurm":
            from orchestrator.launch.launchers.slurm import SlurmLauncher, check_installed

            check_installed()
            return SlurmLauncher(settings, rundir.path, begun)
        case "ray":
            from orchestrator.launch.launchers.ray_cluster import RayLauncher

            return RayLauncher(settings, len(begun))
        case "kubernetes":
            from orchestrator.launch.launchers.kubernetes_cluster import KubernetesLauncher, check_image, check_in_a_pod

            check_image(settings)
            check_in_a_pod(os.environ)
            return KubernetesLauncher(settings)
