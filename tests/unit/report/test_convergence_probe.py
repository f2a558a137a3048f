"""The probe sees what training saw: the loss and the gradient of the step that follows a checkpoint."""

import json

import numpy as np
import pytest

from tests.harness.training import train
from wlb.report.convergence_runs import RunFolder

ITERATIONS, SAVED = 5, 3
WINDOW = 64


@pytest.fixture(scope="module")
def trained(toy_data, tmp_path_factory):
    folder = RunFolder(path=tmp_path_factory.mktemp("probe"))
    saving = ["--ckpt-format", "torch", "--save", folder.checkpoints, "--save-interval", SAVED]
    data = ["--data-path", toy_data, "--split", "95,5,0", "--wlb-packing", "plain", "--wlb-ledger", folder.ledger]
    return folder, train([*data, *saving], iterations=ITERATIONS)


@pytest.fixture(scope="module")
def probed(trained, toy_data):
    from megatron.wlb.convergence_probe import main
    from tests.harness.processes import run_ranks

    folder, _ = trained
    common = {"weights": str(folder.weights(SAVED)), "prefix": str(toy_data)}
    steps = [*(step.tolist() for step in folder.ledger_steps()[SAVED:]), []]
    heldout = {"kind": "heldout", "output": str(folder.heldout(SAVED)), "first": 1900, "stop": 2000}
    gradients = {"kind": "gradients", "output": str(folder.gradients(SAVED)), "steps": steps}
    request = folder.path / "request.json"
    request.write_text(json.dumps({"tasks": [common | heldout, common | gradients]}))
    run_ranks(main, 1, [str(request)])
    return json.loads(folder.heldout(SAVED).read_text()), json.loads(folder.gradients(SAVED).read_text())


def test_loss_and_gradient_of_the_next_step_are_those_of_training(trained, probed):
    _, run = trained
    _, gradients = probed
    assert gradients["losses"][0] == pytest.approx(run.losses[SAVED], rel=1e-6)
    assert gradients["inner_products"][0][0] ** 0.5 == pytest.approx(run.grad_norms[SAVED], rel=1e-5)
    # The control: the step after that is trained at other weights.
    assert gradients["losses"][1] != pytest.approx(run.losses[SAVED + 1], rel=1e-4)
    assert gradients["tokens"] == [8 * WINDOW] * (ITERATIONS - SAVED) + [0]


def test_an_empty_step_has_no_gradient(probed):
    _, gradients = probed
    assert gradients["losses"][-1] == 0
    assert gradients["inner_products"][-1] == [0] * (ITERATIONS - SAVED + 1)


def test_every_position_of_every_held_out_document_counts_once(probed, toy_data):
    from wlb.data.index_file import index_lengths

    documents = np.array(probed[0]["documents"])
    lengths = np.asarray(index_lengths(str(toy_data)))[1900:2000] - 1
    assert lengths.max() > WINDOW  # some are cut
    assert documents[:, 0].tolist() == [1900 + i for i, n in enumerate(lengths) if n > 0]
    assert documents[:, 1].tolist() == [n for n in lengths if n > 0]
    assert np.isfinite(documents[:, 2]).all()
    assert 0 < documents[:, 2].sum() / documents[:, 1].sum() < 2 * np.log(128)
