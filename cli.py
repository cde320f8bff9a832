"""build-model: command-line arguments in, one call, and its result printed. No logic lives here.

stdout carries the result; progress and warnings go to stderr. Heavy imports happen inside the commands, so that
--help answers at once.
"""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from builder.errors import DraftsmithError, MachineError, Refused, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.exporter import GraphReport
    from builder.progress import Progress
    from runtime.generation import Ask, Generation
    from runtime.loading import LoadedPackage
    from runtime.text import Tokenizer

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress and no warnings on stderr.")


def _stop(number: int, frame: object) -> None:
    """Ends as an exception does, so that whatever is half-written is taken back on the way out."""
    raise SystemExit(128 + number)


class Commands(click.Group):
    """A group whose commands turn this project's errors into one line and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            return super().invoke(ctx)
        except DraftsmithError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"build-model: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:  # of the machine, wherever nobody said it better; click ends on a closed pipe itself
            if ctx.params.get("debug") or error.errno == errno.EPIPE:
                raise
            where = f"{one_line(error.filename)}: " if error.filename else ""
            click.echo(f"build-model: {where}{error.strerror or one_line(error)}", err=True)
            ctx.exit(MachineError.exit_code)
        except (KeyboardInterrupt, click.Abort):
            click.echo("build-model: interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
@click.version_option(package_name="draftsmith")
def main(debug: bool) -> None:
    """Quantized Qwen3.5 checkpoints to ONNX Runtime packages with speculative decoding."""


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A bar on stderr for work that lasts; nothing when silenced or not on a terminal."""
    from builder.progress import silent

    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done)

        yield report


def show(result: Any, as_json: bool, human: Callable[[], None]) -> None:
    """The one place where a result becomes output."""
    try:
        if as_json:
            click.echo(json.dumps(result))
        else:
            human()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MachineError(f"stdout: {error.strerror}; the result could not be written") from error


def warn(lines: list[str], quiet: bool) -> None:
    if not quiet:
        for line in lines:
            click.echo(f"build-model: warning: {line}", err=True)


def conversion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What export and plan have in common."""
    options = [
        click.option(
            "--weights",
            type=click.Choice(["auto", "link", "copy"]),
            default="auto",
            help="How weights enter the package.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float16", "bfloat16"]),
            default="auto",
            help="Activation type; auto is float16.",
        ),
        click.option(
            "--mtp",
            type=click.Choice(["auto", "off", "require"]),
            default="auto",
            help="The multi-token-prediction head.",
        ),
        click.option(
            "--max-draft-tokens", type=int, default=3, show_default=True, help="Drafts a step may verify, 1 to 7."
        ),
        click.option(
            "--checkpoints",
            type=click.Choice(["compact", "dense", "off"]),
            default="compact",
            help="What rejected drafts are rolled back by: state updates to replay (compact), the states themselves as"
            " well (dense), or nothing, and then nothing can be drafted.",
        ),
        click.option("--block-size", type=int, default=256, show_default=True, help="Tokens per cache block."),
        click.option("--max-batch-size", type=int, default=100, show_default=True, help="Requests per step."),
        click.option("--context-length", type=int, help="Tokens of context; the model's positions if not given."),
        click.option("--strict", is_flag=True, help="Refuse tensors that no module uses."),
        click.option("--revision", help="Branch, tag or commit where SRC is a Hub id."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@conversion_options
@click.option("--hash", is_flag=True, help="Read linked weights for their digest, and check their values.")
@click.option("--force", is_flag=True, help="Replace an existing package.")
@json_option
@quiet_option
def export(src: Path, out: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Write package OUT from SRC, a checkpoint folder or a Hub id."""
    import builder

    with progress_bar(quiet) as progress:
        report = builder.export(src, out, builder.ExportOptions(**options), progress)
    warn(report.warnings, quiet)

    def human() -> None:
        click.echo(report.package)
        linked, copied = report.weights["linked_bytes"], report.weights["copied_bytes"]
        graph_table(report.graphs, f"{linked:,} bytes of weights linked, {copied:,} written in {report.seconds:.1f} s")

    show(report.to_json(), as_json, human)


@main.command()
@click.argument("src", type=click.Path(path_type=Path))
@conversion_options
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Requests of full context to size memory for.",
)
@json_option
@quiet_option
def plan(src: Path, batch_size: int, as_json: bool, quiet: bool, **options: Any) -> None:
    """Say what an export of SRC would write and what running it takes, from headers alone."""
    import builder

    found = builder.plan(src, builder.ExportOptions(**options), batch_size)
    warn(found.warnings, quiet)

    def human() -> None:
        from builder.display import table

        graph_table(found.graphs, "graphs")
        click.echo(f"parameters: {found.parameters['total']:,}, of which a token passes {found.parameters['active']:,}")
        table("weights", ["", "bytes"], [[name, f"{size:,}"] for name, size in found.weights.items()])
        table("GPU memory", ["", "bytes"], [[name, f"{size:,}"] for name, size in found.memory.items()])

    show(found.to_json(), as_json, human)


def graph_table(graphs: Mapping[str, GraphReport | None], title: str) -> None:
    """MatMuls by format, layers by kind, and below it the modules that are not carried as they are stored."""
    from builder.display import table

    present = {name: graph for name, graph in graphs.items() if graph}
    formats = list(dict.fromkeys(kind for graph in present.values() for kind in graph.matmuls))
    rows = [
        [name, graph.file, graph.nodes, *(graph.matmuls.get(kind, 0) for kind in formats), *graph.layers.values()]
        for name, graph in present.items()
    ]
    table(title, ["graph", "file", "nodes", *formats, "full attention", "linear attention"], rows)
    for graph in present.values():
        if graph.experts:
            click.echo(f"experts of {graph.file}: {', '.join(f'{n:,} {kind}' for kind, n in graph.experts.items())}")
        for module, reason in graph.dequantized.items():
            click.echo(f"{module} is dequantized to float: {reason}")


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@json_option
@quiet_option
def inspect(path: Path, as_json: bool, quiet: bool) -> None:
    """Say what a checkpoint or a package holds, and what is odd about it. A checkpoint's values are read once."""
    import builder
    from builder import display

    with progress_bar(quiet) as progress:
        found = builder.inspect(path, progress)

    def human() -> None:
        click.echo(f"{found['kind']} {path}")
        (display.checkpoint if found["kind"] == "checkpoint" else display.package)(found)
        click.echo("odd:" if found["warnings"] else "odd: nothing")
        for line in found["warnings"]:
            click.echo(f"  - {line}")

    show(found, as_json, human)


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
@quiet_option
def diff(a: Path, b: Path, as_json: bool, quiet: bool) -> None:
    """Say what differs between packages A and B. Exits 0 when nothing does, 1 when anything does."""
    import builder
    from builder.differences_display import lines

    with progress_bar(quiet) as progress:
        found = builder.diff(a, b, progress)

    def human() -> None:
        for line in lines(found):
            click.echo(line)

    show(found.to_json(), as_json, human)
    if not found.equal:
        sys.exit(1)


@main.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to complete.")
@click.option("--chat", help="A user message for the chat template.")
@click.option("--token-ids", help="Prompt tokens, separated by commas.")
@click.option(
    "--requests",
    type=click.Path(path_type=Path),
    help="JSON lines: token_ids or prompt, max_new_tokens, draft_tokens, arrive_at_step, temperature and so on.",
)
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--draft-tokens", type=int, default=0, show_default=True, help="Drafts per step; 0 is plain decoding.")
@click.option(
    "--proposer",
    type=click.Choice(["mtp", "ngram"]),
    default="mtp",
    show_default=True,
    help="Drafts by the package's head, or what followed the last tokens earlier in the text.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the best token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Sample from so many best tokens; 0 is all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample from the best that hold this share.")
@click.option("--seed", type=int, default=0, show_default=True, help="A seed gives one text, with any drafts.")
@click.option("--ep", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Execution provider.")
@click.option("--num-blocks", type=int, help="Cache blocks; what the requests need if not given.")
@click.option("--block-size", type=int, help="Tokens per cache block; the package's if not given.")
@click.option("--max-batch-size", type=int, help="Requests per step; the package's if not given.")
@click.option("--max-scheduled-tokens", type=int, default=2048, show_default=True, help="Packed rows per step.")
@click.option("--overlay", help="A change of configuration that the package holds: plain, latency.")
@click.option("--cuda-graph", is_flag=True, help="On a GPU, record decode and verify steps and replay them.")
@click.option(
    "--unpacked-weights",
    is_flag=True,
    help="On a GPU, keep quantized weights unpacked, too, for steps of many rows: 2 bytes a weight.",
)
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    help="Write logits, hidden states and drafts of one prompt to an .npz file.",
)
@json_option
@quiet_option
def run(
    package: Path,
    prompt: str | None,
    chat: str | None,
    token_ids: str | None,
    requests: Path | None,
    max_new_tokens: int,
    draft_tokens: int,
    proposer: Any,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ep: Any,
    num_blocks: int | None,
    block_size: int | None,
    max_batch_size: int | None,
    max_scheduled_tokens: int,
    overlay: str | None,
    cuda_graph: bool,
    unpacked_weights: bool,
    dump: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Generate text or tokens from PACKAGE."""
    sources = {"--prompt": prompt, "--chat": chat, "--token-ids": token_ids, "--requests": requests}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise Refused(
            "prompt", expected=f"one of {', '.join(sources)}", found=" and ".join(given) or "none", remedy="give one"
        )
    import runtime
    from runtime import generation, recording

    tokenizer = _tokenizer(package, quiet)
    sampling = runtime.SamplingOptions(temperature, top_k, top_p, seed)
    sampling.check()
    asks = _asks(tokenizer, package, sources, generation.Ask((), max_new_tokens, draft_tokens, sampling=sampling))
    loaded = runtime.load(package, ep, overlay, cuda_graph=cuda_graph, unpacked_weights=unpacked_weights)
    warn(_without_effect(loaded, cuda_graph, unpacked_weights), quiet)
    sizes = runtime.EngineOptions(
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_size=loaded.package.max_batch_size if max_batch_size is None else max_batch_size,
        max_scheduled_tokens=max_scheduled_tokens,
        proposer=proposer,
    )
    options = generation.options_for(loaded, asks, sizes)
    if dump:
        recording.check_target(dump, loaded.package, asks)
    with progress_bar(quiet) as progress:
        result = generation.generate(loaded, asks, options, progress)
    if dump:
        recording.write(dump, loaded, asks, options)
    texts = [
        tokenizer.decode(request.token_ids, loaded.package.eos_token_ids) if tokenizer else None
        for request in result.requests
    ]
    show(generation.to_json(result, texts), as_json, lambda: _print_generation(result, texts, quiet))


def _without_effect(loaded: LoadedPackage, cuda_graph: bool, unpacked_weights: bool) -> list[str]:
    """Which options for a GPU do nothing here, and why."""
    lines = []
    if cuda_graph and not loaded.target.records:
        lines.append("--cuda-graph: nothing is recorded on a CPU")
    if unpacked_weights and not loaded.unpacked:
        lines.append("--unpacked-weights: nothing is unpacked on a CPU, or where nothing is quantized")
    return lines


def _tokenizer(package: Path, quiet: bool) -> Tokenizer | None:
    """None for a package without a usable one: token ids work all the same, and text is then null."""
    from builder import paths
    from runtime.text import Tokenizer

    if not paths.is_file(package / "tokenizer.json"):
        return None
    try:
        return Tokenizer(package)
    except Refused as refusal:
        warn([f"no text: {refusal}"], quiet)
        return None


def _asks(tokenizer: Tokenizer | None, package: Path, sources: dict[str, Any], defaults: Ask) -> list[Ask]:
    from dataclasses import replace

    from runtime import generation
    from runtime.text import Tokenizer

    def encoder() -> Tokenizer:
        return tokenizer or Tokenizer(package)

    if sources["--requests"] is not None:
        return generation.read_asks(sources["--requests"], defaults, lambda text: encoder().encode(text))
    if sources["--prompt"] is not None:
        ids = encoder().encode(sources["--prompt"])
    elif sources["--chat"] is not None:
        ids = encoder().encode_chat(sources["--chat"])
    else:
        ids = _parse_ids(sources["--token-ids"])
    return [replace(defaults, token_ids=tuple(ids))]


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise Refused("--token-ids", expected="integers separated by commas", found=text, remedy="mend it")
    return [int(part[:20]) for part in parts]


def _print_generation(result: Generation, texts: list[str | None], quiet: bool) -> None:
    for request, text in zip(result.requests, texts, strict=True):
        click.echo(text if text is not None else ",".join(map(str, request.token_ids)))
    if quiet:
        return
    drafting = [request for request in result.requests if request.draft_tokens]
    for option in sorted({request.drafting_off for request in drafting if request.drafting_off}):
        click.echo(f"warning: {option} switches drafting off for its request", err=True)
    stats = result.stats
    drafts = (
        f"{stats.draft_tokens_accepted}/{stats.draft_tokens_evaluated} drafts accepted"
        if stats.draft_tokens_proposed
        else "no drafts"
    )
    speed = result.num_tokens / result.seconds if result.seconds else 0.0
    click.echo(f"{result.num_tokens} tokens, {speed:.0f} tokens/s, {drafts}", err=True)


@main.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--reference", type=click.Path(path_type=Path), help="Another implementation's answers, an .npz file.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines as for run --requests; built-in without.")
@click.option("--draft-tokens", type=int, help="Drafts per step; the package's limit if not given.")
@click.option("--min-acceptance", type=click.FloatRange(0, 1), help="Smallest share of evaluated drafts to accept.")
@click.option("--ep", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Execution provider.")
@click.option("--deep", is_flag=True, help="Read every byte; fails for content that has no digest to compare with.")
@click.option(
    "--trace",
    is_flag=True,
    help="Name the first layer that is off: against layer_hidden_states of --reference, or a GPU against float32.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Also write the checks as JUnit XML.")
@json_option
@quiet_option
def verify(package: Path, junit: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Check PACKAGE's files, graphs and configuration, then run it: speculative tokens must equal plain ones."""
    import runtime

    with progress_bar(quiet) as progress:
        found = runtime.verify(package, runtime.VerifyOptions(**options), progress)

    def human() -> None:
        from builder.display import table, trace

        if found.trace:
            trace([point.to_json() for point in found.trace])
        rows = [["ok" if check.ok else "FAILED", check.name, check.detail] for check in found.checks]
        table(str(package), ["", "check", "seen"], rows)

    try:
        show(found.to_json(), as_json, human)
    finally:  # whoever closed stdout wants the report all the same
        if junit:
            from builder import junit as report

            report.write(junit, str(package), found.checks)
    if not found.ok:
        sys.exit(found.exit_code)


if __name__ == "__main__":
    main()
