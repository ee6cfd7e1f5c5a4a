"""Mooncake itself, to compare Larder with: its package, and its master."""

import subprocess
import sys

from node import free_port, wait_for

PACKAGES = ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"]
# Larger writes than by default are faster.
SETTINGS = {"MC_TCP_SLICE_SIZE": str(1 << 20), "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


def install_peer(work):
    """Installs Mooncake's own package, which has the module that ours replaces. Returns the interpreter."""
    python = work / "peer/bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", work / "peer"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def packages_of(python):
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def start_master(packages, log):
    """Starts Mooncake's master. Returns the process and its address."""
    port = free_port()
    options = [f"--rpc_port={port}", f"--metrics_port={free_port()}", "--enable_metric_reporting=false"]
    with open(log, "ab") as output:
        command = [packages / "mooncake/mooncake_master", *options, "--logtostderr"]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for(port)
    except BaseException:
        process.kill()
        raise
    return process, f"127.0.0.1:{port}"
