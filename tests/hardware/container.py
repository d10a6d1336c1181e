"""One container under NVIDIA's real runtime and driver, without Kubernetes: whether it gets the GPU that the variable
names by its CDI name, and no other. Needs root, runc, nvidia-container-runtime and a static busybox; prints JSON.

    python3 container.py"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SCRIPT = """
echo "nodes $(cd /dev && ls -d nvidia[0-9]* 2>/dev/null | tr '\\n' ' ')"
echo "libraries $(grep -cE '/(libcuda|libnvidia-ml)[.]so' /proc/self/mountinfo)"
"""


def skip(why):
    print(json.dumps({"skipped": why}))
    sys.exit(0)


def main():
    for program in ("runc", "nvidia-container-runtime", "busybox"):
        if not shutil.which(program):
            skip(f"`{program}` is not installed")
    if os.geteuid() != 0:
        skip("containers are started by root alone")
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True, timeout=30)
    uuids = listed.stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder, "rootfs")
        for name in ("bin", "dev", "etc", "proc", "tmp", "usr/lib64"):
            (root / name).mkdir(parents=True)
        shutil.copy(shutil.which("busybox"), root / "bin/busybox")
        for name in ("sh", "ls", "tr", "grep", "cat"):
            (root / "bin" / name).symlink_to("busybox")
        subprocess.run(["runc", "spec"], cwd=folder, check=True, timeout=30)
        path = pathlib.Path(folder, "config.json")
        config = json.loads(path.read_text())
        config["process"].update(terminal=False, args=["/bin/sh", "-c", SCRIPT])
        config["process"]["env"] = ["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES=runtime.nvidia.com/gpu={uuids[0]}"]
        config["root"]["readonly"] = False
        path.write_text(json.dumps(config))
        run = ["nvidia-container-runtime", "run", f"gpupack-{os.getpid()}"]
        done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False, timeout=50)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-400:]
        if "operation not permitted" in said.lower() or "permission denied" in said.lower():
            skip(f"no container can be started here: {said}")
        print(json.dumps({"failed": said}))
        sys.exit(1)
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    nodes = said.get("nodes", "").split()
    right = len(nodes) == 1 and said.get("libraries", "0") != "0"
    print(json.dumps({"gpus": len(uuids), "nodes": nodes, "libraries": said.get("libraries"), "right": right}))
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
