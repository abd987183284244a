"""`jitney bench device`: measures this machine's accelerator against its own limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.platforms import check_platform
from jitney.engine.common.terminal import say, visible
from jitney.engine.config import Arguments, Command, EngineSection, Flag, FlagGroup, settings
from jitney.engine.lab.device.parts import PARTS
from jitney.engine.lab.device.report import DeviceReport
from jitney.engine.lab.device.rows import PartJob
from jitney.engine.lab.device.run import DevicePlan
from jitney.engine.lab.device.saved import ResultFiles
from jitney.engine.lab.simulation.roofline import SHAPES
from jitney.kernels.prompt_choices import PromptChoice

#: Folder of measurements in a checkout.
_RESULTS = Path("docs/benchmarks")
_KERNELS = settings()["kernels"].choices
_SHAPES = (*(name for name in SHAPES if name.endswith("8b")), PartJob.TINY)
_PARTS_HELP = "; ".join(f"{name}: {part.about}" for name, part in PARTS.items())
_FLAGS = (
    Flag.of(
        "--shape",
        "model shape, with random weights [llama-3.1-8b; on a CPU tiny]",
        "",
        choices=_SHAPES,
    ),
    Flag.of(
        "--dtype", "of weights and activations", "auto", choices=("auto", "bfloat16", "float32")
    ),
    Flag.of("--kernels", "kernel set", "auto", choices=_KERNELS),
    Flag.of("--against", "a second kernel set to time beside it", "", choices=_KERNELS),
    Flag.whole("--page-size", "KV positions per page [64; of the tiny shape 16]", least=8),
    Flag.of("--platform", "where to run", "auto", choices=("auto", "cpu", "cuda", "tpu")),
    Flag.of(
        "--only",
        "parts to run, in the order given; a smoke first, and floors before those with times. "
        f"{_PARTS_HELP}",
        "",
        metavar="A,B",
    ),
    Flag.number(
        "--budget-s",
        "seconds for this call; what matters most comes first, no part has more than 300 or, while "
        "others wait, half of what is left, and a later call goes on where this one stopped",
        DevicePlan.TOTAL_S,
        least=1,
    ),
    Flag.switch("--check", "only compare answers, and time nothing"),
    Flag.switch(
        "--rehearse",
        "every part at the tiny shape on the CPU, whatever device is here: it shows that all of "
        "it runs",
    ),
    Flag.switch("--again", "measure anew, into files of its own, what earlier calls have measured"),
    Flag.of(
        "--out-dir",
        "where the JSON file and the Markdown page go [docs/benchmarks where that is, else here]",
        metavar="FOLDER",
    ),
    Flag.of(
        "--from",
        "go on from what an earlier call left in this folder; it is copied to --out-dir first",
        metavar="FOLDER",
        dest="earlier",
    ),
)


_COMMAND = Command(
    "bench device",
    "Measure copy bandwidth and product rate, then kernels, whole steps and the engine "
    "against the floors that follow from them; every figure is checked on the way.",
    [FlagGroup(_FLAGS)],
)


def bench_device(arguments: Sequence[str]) -> int:
    """Measure, write both files after every row, print parts and goals; exit status 0, or 1 if an
    answer was wrong.
    """
    args = _COMMAND.parse(arguments)
    folder = _folder("--out-dir", args.out_dir or _usual_folder())
    files = ResultFiles(folder, again=args.again)
    if args.earlier:
        files.bring(_folder("--from", args.earlier))
    results = _plan_from(args).measure(files, say)
    report = DeviceReport(results)
    print(visible("\n".join(report.part_table())))
    if results.real:
        print("\n".join(report.goal_table()))
    print(visible(report.numerics()))
    choice = report.prompt_choice()
    if choice is not None:
        print(_choice_line(choice))
    print("written:", *(files.save(results) or ()))
    return int(bool(results.wrong))


def _plan_from(args: Arguments) -> DevicePlan:
    """The plan for the flags. Raises ConfigError if the platform is not on this machine."""
    platform, shape = args.platform, args.shape
    if args.rehearse:
        platform, shape = "cpu", PartJob.TINY
    settings = EngineSection(platform=platform, page_size=args.page_size or 16)
    check_platform(settings.platform)
    only = ()
    if args.only:
        only = tuple(args.only.split(","))
    if args.check:
        only = ("check",)
    return DevicePlan(
        shape=shape,
        dtype=args.dtype,
        kernels=args.kernels,
        against=args.against,
        platform=settings.platform,
        page_size=args.page_size or 0,
        only=only,
        seconds=args.budget_s,
        environment=settings.jax_environment,
    )


def _usual_folder() -> Path:
    return _RESULTS if _RESULTS.is_dir() else Path(".")


def _folder(flag: str, named: str | Path) -> Path:
    folder = Path(named)
    if not folder.is_dir():
        raise ConfigError(f"{flag} {folder}: there is no such folder")
    return folder


def _choice_line(choice: PromptChoice) -> str:
    times = ", ".join(f"{name} {1e3 * spent:.2f} ms" for name, spent in choice["seconds"].items())
    sizes = ", ".join(f"{rows:,}" for rows in choice["rows"])
    return (
        f"prompt attention on sm_{choice['sm']} with heads of {choice['head_dim']} ({sizes} rows): "
        f"{times}; chosen: {choice['by']}"
    )
