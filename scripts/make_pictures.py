"""Makes the pictures of the documentation: the report and TensorBoard of a run with faults, and the
report of several runs.

    python scripts/make_pictures.py [--out docs/pictures]

Needs Chromium (Debian: `apt install chromium-headless-shell`, or any of `BROWSERS`) for the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FAULTS = ("kill:rank=1:step=90:phase=backward", "nan:step=150", "stop:rank=1:step=230",
          "term:step=330")  # fmt: skip
MAX_BYTES = 200_000
TOP = 1370  # pixels of the report, down to its time line
TABLE = 560  # pixels of the report of several runs, down to its first plots
ROOT, RUN = Path(__file__).resolve().parents[1], "sample-with-faults"
SEVERAL = {
    "base": (), "lr-0.03": ("--optim.lr=0.03",), "lr-0.001": ("--optim.lr=0.001",),
    "sgd": ("--optim.name=sgd", "--optim.lr=0.1"), "seed-1": ("--seed=1",),
    "killed": ("--seed=2", "--inject=kill:step=60"),
}  # fmt: skip
"""Run → its flags."""
TENSORBOARD_S = 60.0


def browser() -> str | None:
    """The path of a browser that draws pages without a screen; None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def draw(url: str, width: int, height: int, *options: str) -> str:
    """Open a page in the browser; its output."""
    found = browser()
    if found is None:
        raise FileNotFoundError(f"no browser: looked for {', '.join(BROWSERS)}")
    # A separate profile: two browsers with one profile would wait for each other.
    with tempfile.TemporaryDirectory() as profile:
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={profile}", f"--window-size={width},{height}", *options, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120,
                              check=True).stdout


def screenshot(
    url: str, target: Path, *, width: int = 1200, height: int, wait_ms: int = 0
) -> None:
    """Save a picture of a page in as many colours as `MAX_BYTES` allow."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "page.png")
        draw(url, width, height, f"--screenshot={raw}", "--blink-settings=preferredColorScheme=1",
              *([f"--virtual-time-budget={wait_ms}"] if wait_ms else []))
        image = Image.open(raw).convert("RGB")
    for colors in (256, 128, 64, 32):
        image.quantize(colors, dither=Image.Dither.NONE).save(target, "PNG", optimize=True)
        if target.stat().st_size <= MAX_BYTES:
            break


def train(work: Path) -> None:
    """The shipped recipe under four faults; after the stop it is started again."""
    command = ["launch", "--nproc-per-node", "2", "--", "--run-dir", RUN, "--world.threads=1",
               "--watchdog.limit-s=2", "--checkpoint.every=50", "--log.every=10",
               *(part for fault in FAULTS for part in ("--inject", fault))]  # fmt: skip
    codes = [python(work, *command).wait() for _ in range(2)]
    if codes != [75, 0]:
        raise RuntimeError(f"the run ended with {codes}, not with 75 (stopped), then 0")


def train_several(work: Path) -> None:
    """Short runs with different settings, one of which is killed and started again."""
    for name, flags in SEVERAL.items():
        for _ in range(1 + (name == "killed")):
            python(work, "trainer", "spiral", f"--run-dir=runs/{name}", "--steps=150",
                   "--epochs=None", *flags).wait()


def python(work: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`python -m` of this project, in a folder in which the run's path is short."""
    return subprocess.Popen([sys.executable, "-m", *arguments], cwd=work,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


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
                if b"curves/loss" in tags:
                    break
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise TimeoutError("TensorBoard didn't answer")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/pictures")
    options = parser.parse_args()
    if browser() is None:
        print(f"no browser found ({', '.join(BROWSERS)})", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        train(work)
        if python(work, "trainer", "report", RUN).wait():
            return 1
        page = (work / RUN / "report.html").resolve().as_uri()
        screenshot(page, options.out / "report.png", height=TOP)
        with tensorboard(work) as url:
            # Charts that a worker draws are not in a picture.
            screenshot(f"{url}/?forceSVG=true", options.out / "tensorboard.png", width=1440,
                       height=1050, wait_ms=20_000)
        train_several(work)
        runs = [f"runs/{name}" for name in SEVERAL]
        if python(work, "trainer", "report", *runs, "--out", "several").wait():
            return 1
        page = (work / "several/report.html").resolve().as_uri()
        screenshot(page, options.out / "report-of-several.png", height=TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
