"""A two-stage pipeline of torch.distributed processes on the CPU, marked by the hook: `gloo_pipeline.py RANK FOLDER`.

Each stage receives a tensor, multiplies, and sends it on, in three slots, as SGLang's loop does with micro-batches; the
last stage returns a token tensor to the first. It ends when FOLDER/over appears: the first stage says so to the second.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

from traceana_capture.hook import RankHook

SLOTS, BATCH, WIDTH = 3, 8, 64


def main() -> None:
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    hook = RankHook.from_environment(rank=rank, stage=rank, place={"tp_rank": 0, "pp_size": 2, "tp_size": 1})
    assert hook is not None, "TRACEANA_CAPTURE_HOOK is set for this job"
    weight, hidden = torch.ones(WIDTH, WIDTH), torch.ones(BATCH, WIDTH)
    tokens, going = torch.zeros(BATCH, dtype=torch.int64), torch.ones(1)
    over = False
    while not over:
        for slot in range(SLOTS):
            with hook.slot(slot, BATCH, "DECODE"):
                if rank == 0:
                    going[0] = 0.0 if slot == SLOTS - 1 and (folder / "over").exists() else 1.0
                    distributed.send(going, 1)
                else:
                    distributed.recv(going, 0)
                    distributed.recv(hidden, 0)
                with hook.forward(), torch.profiler.record_function(f"step[DECODE bs={BATCH}]"):
                    for _ in range(4):
                        hidden = torch.tanh(hidden @ weight)
                if rank == 0:
                    distributed.send(hidden, 1)
                    distributed.recv(tokens, 1)
                else:
                    distributed.send(tokens, 0)
            over = bool(going[0] == 0.0)
        time.sleep(0.001)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
