"""The command line: ``fastcaps demo``, ``fastcaps train``, ``fastcaps info``.

Each command imports what it needs when it runs, so that ``fastcaps --help`` and ``import fastcaps`` stay light.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# module that an import may find missing -> the extra of the package that brings it
_EXTRAS = {
    **dict.fromkeys(("lightning", "tensorboard", "torchmetrics", "rich", "numpy"), "train"),
    **dict.fromkeys(("sklearn", "matplotlib"), "demo"),
}
_CONFIG_FLAGS = (
    ("network", str, "network to train (see --list)"),
    ("data", str, "mnist, cifar10, smallnorb, diverse-multimnist, … (see --list; digits ship with scikit-learn)"),
    ("data-dir", str, "folder that holds the data set's files, or a folder of them; nothing is downloaded"),
    ("epochs", int, "passes over the training images"),
    ("batch-size", int, "images a step, on each device"),
    ("optimizer", str, "adam, adamw or sgd"),
    ("lr", float, "highest learning rate"),
    ("weight-decay", float, "weight decay"),
    ("momentum", float, "momentum, for sgd"),
    ("schedule", str, "one-cycle, cosine, paper (a tenth after 3/7 and 5/7 of the run) or constant"),
    ("seed", int, "decides initial weights, order of images, augmentation"),
    ("precision", str, "32-true, bf16-mixed, 16-mixed (autocast), bf16-true or 64-true"),
    ("accelerator", str, "auto, cpu, gpu, … as Lightning has them"),
    ("devices", str, "how many devices, or which (0,1)"),
    ("strategy", str, "auto, ddp, fsdp, … as Lightning has them"),
    ("augment", bool, "pad and crop training images at random (CIFAR and smallNORB are, the others are not)"),
    ("flip", bool, "mirror half of the training images (CIFAR is, the others are not: a mirrored 2 is no 2)"),
    ("limit", int, "use only the first training images, for a quick try"),
    ("workers", int, "processes that prepare batches"),
    ("checkpoint-every", int, "steps between two checkpoints"),
)
_NETWORK_FLAGS = (
    ("iterations", int, "routing iterations"),
    ("routing", str, "concurrent or sequential"),
)


class _Fail(Exception):
    """An error that the user can mend: one line, without a traceback."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastcaps", description="Capsule networks, routed without ever storing a vote.", allow_abbrev=False
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = commands.add_parser("demo", help="train on handwritten digits, measure this machine, draw two pictures")
    demo.add_argument("--out", default="fastcaps-demo", help="folder for the pictures and figures (%(default)s)")
    demo.add_argument("--epochs", type=int, default=None, help="passes over the digits")
    demo.add_argument("--seed", type=int, default=0, help="seed of the training (%(default)s)")
    demo.add_argument("--skip-speed", action="store_true", help="leave out the measurement of speed and memory")
    demo.set_defaults(run=_demo)

    train = commands.add_parser(
        "train",
        help="train a network on images",
        description="Train a network on images. Channels, image size and classes follow from the data.",
        argument_default=argparse.SUPPRESS,  # only options that were given are there: --resume compares them
    )
    train.add_argument("--list", action="store_true", help="list the networks and data sets, and stop")
    train.add_argument("--out", help="folder of the run (runs/NETWORK-DATA)")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --out, with the settings kept there; options given again must agree",
    )
    train.add_argument("--overwrite", action="store_true", help="replace a run that --out already holds")
    train.add_argument(
        "--recipe",
        choices=("quick", "paper"),
        help="defaults of the options below: quick (2 epochs) or the paper's (350)",
    )
    for name, kind, text in (*_CONFIG_FLAGS, *_NETWORK_FLAGS):
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        train.add_argument(f"--{name}", help=text, **how)
    train.set_defaults(run=_train)

    info = commands.add_parser("info", help="what was built, what runs here, and why")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.add_argument("--device", default="cpu", help="device of the call that is explained (%(default)s)")
    info.add_argument("--dtype", default="float32", help="its dtype (%(default)s)")
    info.set_defaults(run=_info)
    return parser


def _refuse_missing(error: ImportError) -> NoReturn:
    """Say which extra brings the missing module; anything else is a fault of ours and stays a traceback."""
    module = (error.name or "").split(".")[0]
    if module not in _EXTRAS:
        raise error
    raise _Fail(f"{module} is not installed; install it with: pip install 'fastcaps[{_EXTRAS[module]}]'") from error


def _demo(args: argparse.Namespace) -> int:
    try:
        from fastcaps.data import DataError
        from fastcaps.demo import EPOCHS, run
    except ImportError as error:
        _refuse_missing(error)
    epochs = EPOCHS if args.epochs is None else args.epochs
    try:
        run(Path(args.out), epochs=epochs, seed=args.seed, speed=not args.skip_speed)
    except (DataError, ValueError) as error:
        raise _Fail(str(error)) from error
    return 0


def _list() -> int:
    from fastcaps import data, models

    print("networks: " + ", ".join(models.names()))
    print("data:     " + ", ".join(data.names()))
    return 0


def _settings(given: dict[str, Any], recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a new run: the recipe's, and over them whatever was given."""
    settings = dict(recipes[given.pop("recipe", "quick")])
    overrides = {name: given.pop(name) for name, _, _ in _NETWORK_FLAGS if name in given}
    settings.update(given, overrides=overrides)
    missing = [f"--{name}" for name in ("network", "data") if name not in settings]
    if missing:
        raise _Fail(f"missing {' and '.join(missing)} (fastcaps train --list shows what there is)")
    settings.setdefault("out", f"runs/{settings['network']}-{settings['data']}")
    return settings


def _kept_settings(given: dict[str, Any], recipes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a run that goes on: those it began with. The same options may be given again, others may not."""
    if "out" not in given:
        given = {**given, "out": _settings(dict(given), recipes)["out"]}
    path = Path(given["out"]) / "config.json"
    if not path.is_file():
        raise _Fail(f"{path.parent} holds no run to resume (no config.json); begin one without --resume")
    try:
        kept = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise _Fail(f"{path} cannot be read ({error}); begin the run anew with --overwrite") from error
    kept.pop("versions", None)
    fresh = dict(recipes[given["recipe"]]) if "recipe" in given else {}
    fresh.update({name: value for name, value in given.items() if name != "recipe"})
    for name, value in fresh.items():
        is_override = any(name == flag for flag, _, _ in _NETWORK_FLAGS)
        before = kept["overrides"].get(name) if is_override else kept.get(name)
        if name in ("out", "data_dir", "devices", "accelerator", "strategy", "workers", "checkpoint_every"):
            kept[name] = value  # where a run is may change, what it computes may not
        elif before != value:
            option = name.replace("_", "-")
            raise _Fail(f"--{option} {value} does not agree with the run in {path.parent}, which began with {before}")
    return kept


def _train(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "version")}
    if given.pop("list", False):
        return _list()
    try:
        from rich.console import Console

        from fastcaps.data import DataError
        from fastcaps.training import RECIPES, RunError, TrainConfig, train
    except ImportError as error:
        _refuse_missing(error)
    resume, overwrite = given.pop("resume", False), given.pop("overwrite", False)
    if resume and overwrite:
        raise _Fail("--resume goes on with a run, --overwrite replaces it: give one of them")
    settings = _kept_settings(given, RECIPES) if resume else _settings(given, RECIPES)
    if settings.get("data_dir") is not None:
        settings["data_dir"] = str(Path(settings["data_dir"]).expanduser().resolve())  # found again from any folder
    try:
        config = TrainConfig(**settings)
        result = train(config, resume=resume, overwrite=overwrite)
    except (DataError, RunError, ValueError) as error:
        raise _Fail(str(error)) from error
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        raise _Fail(f"stopped; fastcaps train --resume --out {settings['out']} goes on") from None
    if not result.is_main:
        return 0  # one of several processes; the first one speaks
    console = Console()
    seconds = [row["seconds"] for row in result.history]
    console.print(
        f"test accuracy {100 * result.test_accuracy:.2f} % after {len(seconds)} "
        f"epoch{'s' if len(seconds) > 1 else ''} of {sum(seconds) / len(seconds):.1f} s",
        highlight=False,
    )
    console.print(f"{result.out}/: result.json, metrics.csv, last.ckpt, tensorboard", highlight=False, soft_wrap=True)
    return 0


def _joined(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _info(args: argparse.Namespace) -> int:
    import torch

    import fastcaps

    try:
        from fastcaps import _C

        build: dict[str, Any] = {**_C.build_info(), "levels built": _C.capabilities_built()}
        try:
            build["level chosen"] = _C.capability()
        except ValueError as error:
            build["level chosen"] = str(error)
    except ImportError:
        build = {}
    dtype = getattr(torch, args.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise _Fail(f"--dtype {args.dtype}: not a dtype of torch (float32, float64, bfloat16, float16)")
    try:
        children = torch.empty(1, 8, 4, 4, dtype=dtype, device=args.device)
        weight = torch.empty(8, 10, 4, 4, dtype=dtype, device=args.device)
        parents = torch.empty(1, 10, 4, 4, dtype=dtype, device=args.device)
        explanation = str(fastcaps.explain(children, weight, parents))
    except (RuntimeError, AssertionError, TypeError) as error:
        explanation = f"no such call: {str(error).splitlines()[0]}"
    listing = fastcaps.backends.listing()
    if args.json:
        backends = {entry.name: {"available": entry.available, "detail": entry.detail} for entry in listing}
        versions = {"fastcaps": fastcaps.__version__, "torch": torch.__version__}
        print(json.dumps({**versions, "build": build, "backends": backends, "explain": explanation}, indent=2))
        return 0
    print(f"fastcaps {fastcaps.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("build" if build else "build: no native library (FASTCAPS_BUILD=0); the reference serves")
    why_not = build.pop("cuda_why_not", "")
    if why_not:
        build["cuda"] = f"none: {why_not}"
    for name, value in build.items():
        if isinstance(value, dict):
            value = "; ".join(f"{key}: {_joined(part)}" for key, part in value.items())
        print(f"  {name.replace('_', ' '):<20}{_joined(value)}")
    print("\nbackends")
    for entry in listing:
        print(f"  {entry}")
    print(f"\na routing pass with parents, {args.dtype} on {args.device}, runs on")
    print("  " + explanation.replace("\n", "\n  "))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error of the user's, 2 for a wrong command line."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.version:
        import fastcaps

        print(f"fastcaps {fastcaps.__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        return args.run(args)
    except _Fail as error:
        print(f"fastcaps {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"fastcaps {args.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
