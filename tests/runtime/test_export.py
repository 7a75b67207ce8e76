from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlplace.errors import InputError
from rlplace.graph.library import spec
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.export import export_weights
from rlplace.runtime.launch import launch
from tests.runtime.test_run import Case


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no good checkpoint"):
        export_weights(tmp_path, tmp_path / "weights.safetensors")


@pytest.mark.dist
def test_the_weights_are_those_of_the_module(tmp_path: Path) -> None:
    job = Case("llama", ((1, 2),)).job()
    options = replace(job.options, steps=1, checkpoint=Checkpoints(str(tmp_path / "run")))
    wanted = launch(job.plan, job.model, job.args, graph=job.graph, options=options).tensors
    export_weights(tmp_path / "run", tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    module = spec(**job.source).make()  # type: ignore[arg-type]  # as in the worker
    assert not module.load_state_dict(found, strict=False).missing_keys
    for name, _ in module.named_parameters():
        assert torch.equal(found[name], wanted[f"weight/{name}"])
