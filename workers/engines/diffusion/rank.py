"""The second process of guidance in parallel; see :mod:`workers.engines.diffusion.parallel`.

``python -m workers.engines.diffusion.rank FD``: the number of the socket that it was born with. It does what
it is told, message by message, and ends when the other side does.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping

import msgspec

from adapters.chunk import Payload
from pipelines.graph import Stage
from workers.engine import ItemError
from workers.engines.diffusion.build import build
from workers.engines.diffusion.family import NEGATIVE, Canvas, Denoiser, Row
from workers.engines.diffusion.parallel import receive, send
from workers.engines.diffusion.passes import Passes
from workers.engines.diffusion.tensors import as_tensor, copied
from workers.engines.engine_thread import is_fatal

log = logging.getLogger("engine")


class Second:
    """What the second process knows: canvases by number, and their negative rows."""

    def __init__(self, denoiser: Denoiser, passes: Passes) -> None:
        self._denoiser = denoiser
        self._passes = passes
        self._canvases: dict[int, Canvas | Exception] = {}

    def do(self, message: Payload) -> Payload | None:
        """Follows one message. Returns the answer, if there is to be one."""
        number = message.get("number", 0)
        match message["do"]:
            case "begin":
                self._canvases[number] = self._begin(message)
            case "compute":
                return {"said": self._compute(message["canvases"])}
            case "state":
                return self._passes.state(_rows(self._canvases[number]))
            case "forget":
                canvas = self._canvases.pop(number)
                if isinstance(canvas, Canvas):
                    self._passes.forget(canvas)
        return None

    def _begin(self, message: Payload) -> Canvas | Exception:
        try:
            wishes = msgspec.convert(message["wishes"], self._denoiser.wishes)
            canvas = self._denoiser.begin(message["inputs"], wishes, message["seed"])
            canvas.conditions = {NEGATIVE: canvas.conditions[NEGATIVE]}
            self._passes.restore(canvas.rows, message["state"])
        except Exception as error:  # it is told when the row is asked for
            if is_fatal(error):
                raise
            return error
        return canvas

    def _compute(self, places: list[Payload]) -> list[object]:
        rows: list[Row | Exception] = []
        for place in places:
            canvas = self._canvases[place["number"]]
            if isinstance(canvas, Canvas):
                canvas.latents = as_tensor(place["latents"]).to(canvas.latents)
                canvas.step = place["step"]
                rows += _rows(canvas)
            else:
                rows.append(canvas)
        said = self._passes([row for row in rows if isinstance(row, Row)])
        results = [said[row] if isinstance(row, Row) else row for row in rows]
        return [_told(each) if isinstance(each, Exception) else copied(each) for each in results]


def _rows(canvas: Canvas | Exception) -> list[Row]:
    return canvas.rows if isinstance(canvas, Canvas) else []


def _told(error: Exception) -> Mapping[str, object]:
    if isinstance(error, ItemError):
        return {"error": str(error), "status": error.status, "param": error.param}
    return {"error": f"{type(error).__name__}: {error}", "status": 500, "param": None}


def main() -> None:
    """Loads, says so, and serves."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as line:
        setup = receive(line)
        if setup is None:
            return
        stage = msgspec.convert(setup["stage"], Stage)
        try:
            second = Second(*build(stage, setup["device"]))
        except Exception:
            log.critical("the second rank can't load its model", exc_info=True)
            logging.shutdown()
            os._exit(1)
        import torch  # build() has set it up

        try:
            send(line, {})
            with torch.inference_mode():
                while (message := receive(line)) is not None:
                    answer = second.do(message)
                    if answer is not None:
                        send(line, answer)
        except BrokenPipeError:
            log.debug("the first rank has ended")
    logging.shutdown()
    os._exit(0)  # threads of libraries are not waited for


if __name__ == "__main__":
    main()
