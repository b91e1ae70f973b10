"""The docker runtime on a real engine: what is swapped, what is refused, and that the old model is back every time."""

import pytest

from tests.serving.room import Room
from training.serving import control

pytestmark = pytest.mark.docker


def test_a_model_is_swapped_in_checked_and_the_old_one_put_back(harbour: Room):
    harbour.start()
    before = control.status(harbour.name)
    evaluation = harbour.evaluate()
    document = evaluation.document
    assert evaluation.error is None, str(evaluation.error)
    assert document["loaded"]["path"] == "/app/models/trained/new/new-F16.gguf"
    assert document["fingerprint"]["top1_agree"] == 4 and document["prompt_ids"]["compared"]
    assert document["restore"]["proved"] and harbour.serves() == "old-F16"
    after = control.status(harbour.name)
    for part in ("image", "config_hash", "command", "environment", "variables", "sha256"):
        assert after["record"][part] == before["record"][part], part
    assert after["loaded"] == before["loaded"] and after["record"]["container"] != before["record"]["container"]
    assert document["seconds"]["overhead"] < 5
    assert document["server"]["image"] == before["record"]["image"]
