"""The engine's own process: `python -m training.engine.child FOLDER PULSE RESULT PARENT`, started by the supervisor.

FOLDER is a run's; PULSE and RESULT are descriptors: the page it says its stage on, and the file that it leaves one JSON
document in: `{"summary"}`, `{"error"}`, `{"fault"}` or `{"interrupted", "what"}`. A death without one is the
supervisor's to explain.
It dies with its supervisor. SIGUSR1 writes the stacks of all threads to the run's `stacks.log`, as do fatal signals.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from training.core import log, process
from training.core.errors import Terminated, TrainyardError, translated

STACKS_FILE = "stacks.log"


def main(folder: str, pulse: str, result: str, supervisor: str) -> int:
    """Train the run of a folder and leave what came of it; the exit code is 0 whenever that was left."""
    process.die_with(int(supervisor))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise_terminated)
    log.configure()
    with open(Path(folder) / STACKS_FILE, "a") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        document = _train(Path(folder), int(pulse))
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
    os.pwrite(int(result), json.dumps(document).encode(), 0)
    return 0


def _train(folder: Path, pulse: int) -> dict:
    try:
        from training.engine import launch
        from training.engine.pulse import Pulse
        from training.runs.folder import RunFolder

        return {"summary": launch.train(RunFolder(folder), Pulse(pulse))}
    except KeyboardInterrupt as interrupt:
        name = interrupt.signal_name if isinstance(interrupt, Terminated) else "SIGINT"
        return {"interrupted": name, "what": str(interrupt)}
    except Exception as error:
        known = error if isinstance(error, TrainyardError) else translated(error)
        if known is None:
            log.say(traceback.format_exc())
        return {"error": known.to_json()} if known else {"fault": repr(error)}


def _raise_terminated(number: int, _: object) -> None:
    raise Terminated(signal_name=signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
