"""The engine's own process: `python -m training.engine.child FOLDER PULSE RESULT PARENT`, started by the supervisor.

FOLDER is a run's; PULSE and RESULT are descriptors: the page it says its stage on, and the file that it leaves one JSON
document in: `{"summary"}`, `{"error"}`, `{"fault"}`, `{"deserted"}` where another process of the run is gone, or
`{"interrupted", "what"}`. A death without one is the supervisor's to explain.
It dies with its supervisor. SIGUSR1 writes the stacks of all threads to the run's `stacks.log`, as do fatal signals.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from training.core import log, process, report, signals
from training.core.errors import TrainyardError, translated
from training.runs.folder import STACKS_FILE, RunFolder


def main(folder: str, pulse: str, result: str, supervisor: str) -> int:
    """Train the run of a folder and leave what came of it; the exit code is 0 whenever that was left."""
    process.die_with(int(supervisor))
    signals.raise_terminated()
    log.configure()
    advise_train(Path(folder))
    with open(Path(folder) / STACKS_FILE, "a") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        document = _train(Path(folder), int(pulse))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
    os.pwrite(int(result), json.dumps(document).encode(), 0)
    return 0


def advise_train(folder: Path) -> None:
    """Let what an error names next be a new run of the recipe: `resume` takes no value of one."""
    if report.running()[0] == "resume":
        os.environ.pop("MAKELEVEL", None)  # whose words are those of the resume
        os.environ[report.RUNNING] = json.dumps(["train", "--config", str(folder / "recipe.yaml")])


def _train(folder: Path, pulse: int) -> dict:
    try:
        from training.engine import launch
        from training.engine.pulse import Pulse

        return {"summary": launch.train(RunFolder(folder), Pulse(pulse))}
    except KeyboardInterrupt as interrupt:
        return {"interrupted": signals.name_of(interrupt), "what": str(interrupt)}
    except Exception as error:
        known = error if isinstance(error, TrainyardError) else translated(error)
        if known is None and _is_deserted(error):
            return {"deserted": str(error)}
        if known is None:
            log.say(traceback.format_exc())
        return {"error": known.to_json()} if known else {"fault": repr(error)}


def _is_deserted(error: Exception) -> bool:
    parallel = sys.modules.get("training.engine.parallel")
    return parallel is not None and parallel.is_of_another(error)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
