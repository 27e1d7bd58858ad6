"""Make .venv with torch and numpy: `python .ci/install.py torch==2.13.0`.

If the Python that runs this has torch already (an image of a cluster, say), .venv uses
that torch, and nothing is downloaded for it.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

VENV = Path(__file__).resolve().parent.parent / ".venv"
NUMPY = "numpy==2.2.6" if sys.version_info < (3, 11) else "numpy==2.4.6"


def main(torch):
    if sys.version_info < (3, 10):  # noqa: UP036 (that is what it is for)
        sys.exit("Python 3.10 or newer is needed: make PYTHON=/path/to/it")
    found = importlib.util.find_spec("torch")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV])
    if made.returncode != 0:
        sys.exit(made.returncode)  # it has said why: on Debian, install python3-venv
    python = VENV / "bin" / "python"
    if found is None:
        print("installing torch into .venv: some minutes, the first time", flush=True)
        # `torch` may have options behind it, such as --index-url.
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *torch.split()], check=True
        )
    else:
        print(f"using the torch of {sys.executable}", flush=True)
        there = Path(found.origin).parent.parent
        library = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            text=True,
        )
        Path(library.strip(), "with_torch.pth").write_text(f"{there}\n")
    has_numpy = subprocess.run([python, "-c", "import numpy"], capture_output=True)
    if has_numpy.returncode != 0:
        subprocess.run([python, "-m", "pip", "install", "-q", NUMPY], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
