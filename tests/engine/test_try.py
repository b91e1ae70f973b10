import sys
import pytest
from tests.engine.test_run import losses, train, final_weights
from tests.objectives.tiny import make_world, resume_in_the_middle
import json

def test_it(tmp_path, monkeypatch):
    w = make_world(tmp_path, monkeypatch)
    for m in ("lora","full","qlora"):
        o=("lora.dropout=0",) if m!="full" else ()
        o+=("data.micro_batch=3","stop.max_steps=20","checkpoint.every_steps=2", "checkpoint.keep=30")
        _, a = train(w/f"{m}.yaml", *o)
        c, b = train(w/f"{m}.yaml","backend=trl", *o)
        assert c==0
        la,lb=losses(a),losses(b)
        print(m, max(abs(la[k]-lb[k]) for k in la), la)
        print(json.loads((b.path/"summary.json").read_text()))
        print((b.path/"events.jsonl").read_text()[:3000])
    c, b = train(w/"lora.yaml","backend=trl","lora.dropout=0.5")
    resume_in_the_middle(b)
