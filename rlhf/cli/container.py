"""A recipe for a GPU runs in the container image: the command line is handed on to the same program there.

The container sees the paths that the command names, under the names that they have here. What is written belongs to the
caller, recipes are read-only, and tokens are passed by name, so that no command line shows them. Nothing starts a
container inside an image, nor for one of several ranks.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from rlhf import __version__
from rlhf.errors import UserError
from rlhf.files import cache_root
from rlhf.process import distributed
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.folders import default_root
from rlhf.run.provenance import code_version

RUNTIME, IMAGE, INSIDE = "RLHF_RUNTIME", "RLHF_IMAGE", "RLHF_INSIDE"  # environment; Dockerfile sets the last
CHECKOUT = Path(__file__).parents[2]
BY_NAME = (
    *("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "RLHF_RECIPES", "RLHF_VRAM_CAP", "RLHF_DEBUG", "OPENAI_API_KEY"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "WANDB_API_KEY", "WANDB_MODE", "WANDB_ENTITY", "WANDB_BASE_URL"),
    "TRACKIO_SPACE_ID",
)
OPTION = click.option(
    "--runtime",
    type=click.Choice(["docker", "podman", "local"]),
    envvar=RUNTIME,
    default="docker",
    show_default=True,
    expose_value=False,
    callback=lambda context, parameter, runtime: os.environ.update({RUNTIME: runtime}),
    help="Where a recipe for a GPU runs: in the image, by docker or podman, or here.",
)


def enter(loaded: PinnedRecipe, root: Path) -> None:
    """Put the same command in the image in the place of this process, where a recipe's device is CUDA.

    It writes into `root`, which is made if need be, and into the folder of what --to names. What other options name is
    shown if it is a path here, and so is every path that the recipe names; --port is published on this machine. Returns
    where the command runs here: then so do all that it starts. Raises UserError where the engine, or the image, is not
    there.
    """
    runtime = os.environ.get(RUNTIME, "local")
    if runtime == "local" or INSIDE in os.environ or distributed.launched() or loaded.recipe.hardware.device != "cuda":
        os.environ[RUNTIME] = "local"
        if INSIDE not in os.environ:
            os.environ.pop(IMAGE, None)  # the manifest names the image that a run is in
        return
    values = click.get_current_context().params
    to, port = values.get("to"), values.get("port")
    folders = [Path(os.path.abspath(folder)) for folder in (_hub(), root, *([to.parent] if to else []))]
    name, identity = image(runtime)
    for folder in (cache_root(), *folders):
        folder.mkdir(parents=True, exist_ok=True)
    recipe, folder = loaded.recipe, loaded.directory
    of_recipe = [*recipe.data.files, recipe.model.name, recipe.tokenizer.name, recipe.evaluate.bertscore_model]
    typed = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    named = [*typed, *of_recipe, default_root(), folder, folder.parent.parent, *_modules()]
    shown = {os.path.abspath(path) for path in named if isinstance(path, str | Path) and os.path.exists(path)}
    only_read = [path for path in sorted(shown) if not any(Path(path).is_relative_to(folder) for folder in folders)]
    options = [f"-v={path}:{path}" for path in folders] + [f"-v={path}:{path}:ro" for path in only_read]
    options += [f"-p=127.0.0.1:{port}:{port}"] * (port is not None)
    options += [*_options(runtime), f"-e={IMAGE}={identity}"]
    module = getattr(sys.modules["__main__"].__spec__, "name", "rlhf.cli").removesuffix(".__main__")
    program = [name] if module.startswith("rlhf") else ["--entrypoint=python", name, "-m", module]
    os.execvp(runtime, [runtime, "run", *options, *program, *sys.argv[1:]])


def image(engine: str) -> tuple[str, str]:
    """Return the name and the id of the image, which is built or fetched if it is missing.

    It is RLHF_IMAGE's, or that of this checkout's commit; one of changed code is always built. Raises UserError.
    """
    if shutil.which(engine) is None or subprocess.run([engine, "info"], capture_output=True).returncode:
        raise UserError(f"{engine} does not answer; `{engine} info` says why. Without a container: --runtime local")
    code = code_version()
    commit = f"{code.commit or 'unknown'}{'-dirty' * bool(code.dirty)}"
    named = os.environ.get(IMAGE)
    name = named or f"rlhf-one-gpu:{__version__}-{commit[:12]}{'-dirty' * bool(code.dirty)}"
    if not (found := _identity(engine, name)) or (code.dirty and not named):
        if named is None and not (CHECKOUT / "Dockerfile").is_file():
            raise UserError(f"{IMAGE}: name an image; only a checkout builds one. Without a container: --runtime local")
        words = ["pull", name] if named else ["build", *_build_arguments(commit), "-t", name, str(CHECKOUT)]
        if subprocess.run([engine, *words], stdout=sys.stderr).returncode or not (found := _identity(engine, name)):
            raise UserError(f"`{engine} {words[0]}` failed, see above; without a container: --runtime local")
    return name, found


def _identity(engine: str, name: str) -> str:
    """Return the id of an image; "" where there is none."""
    return subprocess.run(
        [engine, "image", "inspect", "-f", "{{.Id}}", name], capture_output=True, text=True
    ).stdout.strip()


def _build_arguments(commit: str) -> list[str]:
    values = {"VERSION": __version__, "COMMIT": commit} | {
        name: value for name in ("BASE", "PIP_ARGS", "PIP_INSTALL") if (value := os.environ.get(name))
    }
    return [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]


def _options(engine: str) -> list[str]:
    """Return the engine's options that are the same for every command."""
    gpu = ["--device=nvidia.com/gpu=all", "--userns=keep-id"] if engine == "podman" else ["--gpus=all"]
    terminal = ["-it"] if sys.stdin.isatty() and sys.stdout.isatty() else [] if sys.stdin.isatty() else ["-i"]
    return [
        *("--rm", "--init", "--ipc=host", *gpu, *terminal, f"--user={os.getuid()}:0", f"-w={Path.cwd()}"),
        *(f"-e={name}" for name in BY_NAME),
        *(f"-e=HF_HOME={_hub()}", f"-v={cache_root()}:/cache/rlhf"),
    ]


def _hub() -> Path:
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def _modules() -> list[Path]:
    """Return the modules in the current folder: a user's own rewards are among them."""
    return [file for file in Path.cwd().glob("*.py") if file.name != "setup.py"]


if __name__ == "__main__":  # make image, make shell
    try:
        print(image(sys.argv[1] if len(sys.argv) > 1 else "docker")[0])
    except UserError as error:
        sys.exit(f"error: {error}")
