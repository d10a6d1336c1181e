"""Matrix products under each share of an MPS daemon's compute: says at which percentages some of the output
was not written, or wrong. Needs PyTorch and a GPU that nothing else uses; starts and ends a daemon of its own.

    python3 products.py [PERCENT…]"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

AT_A_TIME = 10
SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (128, 8192, 8192), (1000, 3000, 5000), (2048, 768, 3072), (4096, 4096, 512)]
REPEATS = 2


def one():
    """The products under the share of this process; prints what was off."""
    import torch

    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        unwritten = wrong = 0
        for m, n, k in SHAPES:
            a = torch.randn(m, k, device="cuda", dtype=kind)
            b = torch.randn(k, n, device="cuda", dtype=kind)
            expected = a.float() @ b.float()
            for _ in range(REPEATS):
                c = torch.full((m, n), float("nan"), device="cuda", dtype=kind)
                torch.matmul(a, b, out=c)
                torch.cuda.synchronize()
                unwritten += int(c.isnan().sum())
                wrong += int(((c.float() - expected).abs() > 0.05 * expected.abs().max()).sum())
        found[str(kind).removeprefix("torch.")] = [unwritten, wrong]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(json.dumps({"sms": sms, "found": found, "model": torch.cuda.get_device_name(0), "torch": torch.__version__}))


def ranges(numbers):
    """Numbers in order as `1 to 13, 23`."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in parts) or "none"


def all_shares(percents):
    with tempfile.TemporaryDirectory() as folder:
        variables = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=variables, check=True)

        def run(percent):
            share = dict(variables, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=str(percent))
            done = subprocess.run([sys.executable, __file__, "one"], env=share, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{percent} %: {done.stderr}")
            return json.loads(done.stdout)

        try:
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                results = dict(zip(percents, pool.map(run, percents)))
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", env=variables)
    first = next(iter(results.values()))
    print(f"hardware: {first['model']}, PyTorch {first['torch']}, {len(SHAPES) * REPEATS} products each")
    for percent, result in results.items():
        off = {kind: counts for kind, counts in result["found"].items() if any(counts)}
        if off:
            print(f"  {percent} %, {result['sms']} multiprocessors: [unwritten, wrong] {off}")
    for kind in first["found"]:
        clean = [percent for percent, result in results.items() if not any(result["found"][kind])]
        print(f"hardware: {kind} is right at {ranges(clean)} percent")


if __name__ == "__main__":
    if sys.argv[1:] == ["one"]:
        one()
    else:
        all_shares([int(percent) for percent in sys.argv[1:]] or list(range(1, 101)))
