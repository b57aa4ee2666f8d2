"""The pictures of the README: a run with faults, its report, its TensorBoard.

    python -m benchmarks.pictures [--out docs/pictures] [--work FOLDER]

Needs Chromium (Debian: `apt install chromium-headless-shell`, or any of `BROWSERS`) for the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageChops

from benchmarks import reporting

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FAULTS = ("kill:rank=1:step=90:phase=backward", "nan:step=150", "stop:rank=1:step=230",
          "term:step=330")  # fmt: skip
HEIGHT, MARGIN, MAX_BYTES = 7000, 16, 200_000
TOP = 1480  # of the report: down to its time line
ROOT, RUN = Path(__file__).resolve().parents[1], "sample-with-faults"
TAGS = "%5E(train%7Cvalidation)%2F(loss%7Caccuracy)"
TENSORBOARD_S = 60.0


def browser() -> str | None:
    """The path of a browser that can draw a page without a screen; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _draw(url: str, width: int, height: int, *options: str) -> str:
    found = browser()
    if found is None:
        raise FileNotFoundError(f"no browser: looked for {', '.join(BROWSERS)}")
    # A folder of its own: two at a time would wait for each other, and it asks for none at home.
    with tempfile.TemporaryDirectory() as profile:
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={profile}", f"--window-size={width},{height}", *options, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120,
                              check=True).stdout


def scroll_width(page: Path, width: int, work: Path) -> int:
    """Width in pixels of a page in a viewport of `width`: more than `width` if it scrolls sideways.

    The viewport is a frame, because a window of headless Chromium is at least 500 pixels wide.
    """
    probe = work / "probe.html"
    probe.write_text(
        f'<!DOCTYPE html><title></title><iframe srcdoc="{html.escape(page.read_text())}" '
        f'style="border: 0; width: {width}px; height: 1000px"></iframe><script>onload = () => '
        '{ const { contentWindow: view, contentDocument: page } = document.querySelector("iframe");'
        ' document.title = `wide ${view.innerWidth} ${page.documentElement.scrollWidth}` }'
        '</script>')
    text = _draw(probe.as_uri(), max(width, 500), 1000, "--dump-dom")
    found = re.search(r"<title>wide (\d+) (\d+)</title>", text)
    if found is None or int(found[1]) != width:
        raise RuntimeError(f"{page} was not laid out at {width} pixels")
    return int(found[2])


def screenshot(url: str, target: Path, *, width: int, dark: bool = False,
               height: int | None = None, most: int = HEIGHT, wait_ms: int = 0) -> None:
    """A picture of a page in at most 256 colours.

    Args:
        height: of the window, in pixels; default: what the content needs, `most` at the most.
    """
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "page.png")
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        wait = [f"--virtual-time-budget={wait_ms}"] if wait_ms else []
        _draw(url, width, height or HEIGHT, f"--screenshot={raw}", scheme, *wait)
        image = Image.open(raw).convert("RGB")
    if height is None:
        empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
        box = ImageChops.difference(image, empty).getbbox()
        image = image.crop((0, 0, width, min(most, (box[3] if box else 0) + MARGIN)))
    _save(image, target)


def _save(image: Image.Image, target: Path) -> None:
    for colors in (256, 128, 64, 32):
        buffer = io.BytesIO()
        image.quantize(colors, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MAX_BYTES:
            break
    target.write_bytes(buffer.getvalue())


def train(work: Path) -> None:
    """The shipped recipe under four faults; after the stop it is started again."""
    command = ["launch", "--nproc-per-node", "2", "--", "--run-dir", RUN, "--world.threads=1",
               "--watchdog.limit-s=2", "--checkpoint.every=50", "--log.every=10",
               *(part for fault in FAULTS for part in ("--inject", fault))]  # fmt: skip
    codes = [python(work, *command).wait() for _ in range(2)]
    if codes != [75, 0]:
        raise RuntimeError(f"the run ended with {codes}, not with 75 (stopped), then 0")


def python(work: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`python -m` of this project, in a folder in which the run's path is short."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=work,
                            env=os.environ | {"PYTHONPATH": path})


@contextlib.contextmanager
def tensorboard(work: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows the run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = python(work, "tensorboard.main", "--logdir", RUN, "--host", "127.0.0.1", "--port",
                     str(port), "--load_fast", "false")
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + TENSORBOARD_S
        while True:
            with contextlib.suppress(OSError):
                tags = urllib.request.urlopen(f"{url}/data/plugin/scalars/tags", timeout=5).read()
                if b"train/loss" in tags:
                    break
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise TimeoutError("TensorBoard didn't answer")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--work", type=Path, help="where the run is, and stays; default: nowhere")
    options = parser.parse_args(argv)
    if browser() is None:
        print(f"no browser found ({', '.join(BROWSERS)})", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (work / RUN / "summary.json").exists():
            train(work)
        if python(work, "trainer", "report", RUN).wait():
            return 1
        page = (work / RUN / "report.html").resolve().as_uri()
        screenshot(page, options.out / "report.png", width=1200, most=TOP)
        for name, width, dark in (("report-dark", 1200, True), ("report-phone", 380, False),
                                  ("report-phone-dark", 380, True)):
            screenshot(page, work / f"{name}.png", width=width, dark=dark)
        with tensorboard(work) as url:
            screenshot(f"{url}/#scalars&_smoothingWeight=0&tagFilter={TAGS}",
                       options.out / "tensorboard.png", width=1200, height=760, wait_ms=20_000)
    return 0


if __name__ == "__main__":
    reporting.finish(main)
