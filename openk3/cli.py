"""The command line, `k3`: one thin command per verb. Those of API keys are in `key_commands`,
those of tools in `tool_commands`.

The model stack is imported inside the commands that need it, so that help and mistakes answer at once. What the user
gets wrong ends as one line on stderr and exit code 2; what fails in spite of a right command, as one line and 1.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from openk3 import __version__
from openk3.engine.config import EngineConfig, WeightFormat
from openk3.key_commands import keys_app, usage
from openk3.terminal import AsJson, ctrl_c_stops, harmless, print_json, spinner
from openk3.tool_commands import McpConfig, mcp, open_tools, search

if TYPE_CHECKING:
    from openk3.llm import LLM
    from openk3.responses import Piece

DEFAULT_MODEL = "smollm2-135m"


class _Group(TyperGroup):
    """Ends every failure as one line on stderr instead of a panel or a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            sys.exit(super().main(*args, **kwargs) or 0)
        except typer.TyperException as error:
            if message := error.format_message():
                _fail(f"{message} (k3 --help explains)", 2)
            sys.exit(2)  # a bare `k3`, which has shown its help
        except typer.Abort:
            _fail("aborted", 130)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
        except ValueError as error:
            _fail(str(error), 2)
        except RuntimeError as error:
            _fail(str(error), 1)

    def invoke(self, ctx: Any) -> Any:
        result = super().invoke(ctx)
        sys.stdout.flush()  # here a broken pipe is still ours to end quietly; at the interpreter's exit it is not
        return result


def _fail(message: str, code: int) -> NoReturn:
    print(f"k3: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    name="k3",
    cls=_Group,
    rich_markup_mode="rich",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    # The lines below the first are shown as they stand: short enough for a terminal of 80 columns.
    help="""Run, chat with and serve language models on an ordinary CPU.

Try:
  [cyan]k3 chat[/cyan]                       talk to the default model here
  [cyan]k3 serve[/cyan]                      web chat and OpenAI-compatible API
  [cyan]k3 generate "Explain tides"[/cyan]   one answer, also for scripts
  [cyan]k3 doctor[/cyan]                     what this machine has and what is missing

[cyan]k3 COMMAND --help[/cyan] explains a command, with examples.
""",
)

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A known name ([cyan]k3 models[/cyan]), a directory, a .gguf file or a Hugging Face id."
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.", show_default="one per core")]
Weights = Annotated[
    WeightFormat,
    typer.Option("--weights", help="How matrices are held: int8 is faster and a little less exact, int4 more so."),
]
System = Annotated[str | None, typer.Option("--system", "-s", help="What the model is told before the chat.")]

_SAMPLING = "Sampling"
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0 keeps all.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Drop tokens less likely than this part of the best.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 discourages repeating.", rich_help_panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="Per earlier use of a token.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="For any earlier use of a token.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="The same seed gives the same answer.", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", help="Longest answer.", show_default="the context", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer; may be repeated.", rich_help_panel=_SAMPLING),
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"k3 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel="Models")
def pull(
    name: Annotated[str, typer.Argument(help="A known name, a Hugging Face id, a .gguf file or a directory.")],
    as_json: AsJson = False,
) -> None:
    """Download a model and make it ready, so that its first use does not wait.

    An interrupted download goes on where it stopped; a second pull is quick.
    The first one also compiles the CPU kernels for this machine.
    Prints the directory of the model.

      [cyan]k3 pull qwen2.5-coder-0.5b[/cyan]        a known model, see k3 models
      [cyan]k3 pull Qwen/Qwen3-0.6B[/cyan]           from Hugging Face
      [cyan]k3 pull ./model.Q8_0.gguf[/cyan]         a file, converted once
    """
    path = _fetch(name)
    _compile()
    print_json({"name": name, "path": str(path)}) if as_json else typer.echo(path)


@app.command(rich_help_panel="Models")
def models(
    preset: Annotated[
        str | None, typer.Option("--preset", help="Show what one of OpenK3's own designs costs to hold and to run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models known by name: licence, size, and whether they are on this machine.

    Or show the card of one of OpenK3's own designs: debug, nano, mini,
    pro-256k, pro-1m.

      [cyan]k3 models[/cyan]
      [cyan]k3 models --preset pro-1m[/cyan]         size, windows, memory and work per token
      [cyan]k3 models --json | jq '.models[].name'[/cyan]
    """
    from openk3 import cards

    if preset is not None:
        card = cards.preset_card(preset)
        print_json(card) if as_json else typer.echo(cards.preset_text(card))
    else:
        rows = cards.known_rows()
        print_json({"models": rows}) if as_json else typer.echo(cards.known_text(rows))


@app.command(rich_help_panel="Models")
def quantize(
    model: Annotated[str, typer.Argument(help="A known name, a Hugging Face id, a .gguf file or a directory.")],
    form: Annotated[
        Literal["int8", "int4", "exact"] | None,
        typer.Option("--format", help="Bits per weight, or 'exact' for a GGUF file's own.", show_default="see above"),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Columns with one scale in int4: 32, 64 or 128.", show_default="32 or 64"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", help="Text like what the model will read.", show_default="a mixed one"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to make.", show_default="MODEL-FORMAT"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a smaller, faster copy of a model, as a directory that every command takes.

    The weights are chosen so that the model says the same about a calibration
    text, which takes minutes. The numbers of a GGUF file in Q4_0, Q4_1 or Q8_0
    are taken over exactly, which takes seconds: the default where there is one.

      [cyan]k3 quantize smollm2-135m[/cyan]                      exactly, into ./smollm2-135m-exact
      [cyan]k3 quantize qwen2.5-coder-0.5b --format int4[/cyan]  calibrated, 6.5 times smaller
      [cyan]k3 quantize ./my-model --calibration letters.txt -o ./my-model-int4[/cyan]
    """
    from openk3 import cards
    from openk3.weights.quantize import quantize as run

    tty = sys.stderr.isatty()
    outcome = run(model, format=form, group_size=group_size, calibration=calibration, output=output, progress=tty)
    card = cards.quantized_card(outcome)
    print_json(card) if as_json else typer.echo(cards.quantized_text(card))


@app.command(rich_help_panel="Use")
def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text; '-' or nothing reads it from stdin.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Text file that follows the prompt ('-' for stdin).")
    ] = None,
    model: Model = DEFAULT_MODEL,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is instead of answering it.")] = False,
    as_json: AsJson = False,
    threads: Threads = None,
    weights: Weights = "auto",
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
) -> None:
    """Answer one prompt on stdout, as it is generated.

    The prompt goes to the model as a chat message; with --raw, and for models
    that cannot chat, as text to be continued.

      [cyan]k3 generate "Three facts about owls"[/cyan]
      [cyan]k3 generate "Summarise this:" --file report.txt --temperature 0[/cyan]
      [cyan]git diff | k3 generate --system "Review this patch." -[/cyan]
      [cyan]k3 generate --raw "The capital of France is" -n 5 --json | jq .text[/cyan]
    """
    text = _prompt_text(prompt, file)
    if raw and system is not None:
        raise ValueError("--system belongs to a chat: leave out --raw")
    sampling = _sampling(ctx)
    with _load(model, threads, weights) as llm:
        plain = raw or (system is None and llm.tokenizer.chat_template is None)
        told = [{"role": "system", "content": system}] if system is not None else []
        turns = [*told, {"role": "user", "content": text}]
        stream = llm.stream(text, **sampling) if plain else llm.chat_stream(turns, **sampling)
        show = harmless if sys.stdout.isatty() else str
        answer, end = "", None
        with stream, ctrl_c_stops(stream):
            for piece in stream:
                answer, end = answer + piece.text, piece
                if not as_json:
                    sys.stdout.write(show(piece.text))
                    sys.stdout.flush()
        assert end is not None
        if not as_json:
            sys.stdout.write("\n")
        elif end.finish_reason != "cancelled":
            print_json({"model": model, "text": answer, **_end(end)})
        if end.finish_reason == "cancelled":
            raise typer.Exit(130)


@app.command(rich_help_panel="Use")
def chat(
    ctx: typer.Context,
    model: Model = DEFAULT_MODEL,
    system: System = None,
    load: Annotated[str | None, typer.Option("--load", help="Go on with a chat that /save wrote.")] = None,
    tool: Annotated[
        list[str] | None, typer.Option("--tool", help="calculator or datetime, for the model to call; may be repeated.")
    ] = None,
    document: Annotated[
        list[str] | None, typer.Option("--document", help="File or folder for it to search in; may be repeated.")
    ] = None,
    mcp_config: McpConfig = None,
    threads: Threads = None,
    weights: Weights = "auto",
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
) -> None:
    """Talk to a model in the terminal.

    /help lists the commands of the chat (/save, /load, /system, ...).
    Ctrl-C stops a reply, Ctrl-D leaves.

      [cyan]k3 chat --model qwen2.5-coder-0.5b --system "You write Python."[/cyan]
      [cyan]k3 chat --load tides.json[/cyan]
      [cyan]k3 chat -m qwen2.5-coder-0.5b --tool calculator --document lease.pdf[/cyan]
    """
    from openk3.chat.saved import load_chat
    from openk3.repl import Repl

    sampling = _sampling(ctx)
    messages = load_chat(load).messages if load is not None else []
    with open_tools(tool or (), document or (), mcp_config) as tools, _load(model, threads, weights) as llm:
        llm.tokenizer.render_chat([{"role": "user", "content": "Hello"}])  # a model that cannot chat says so at once
        if sys.stdin.isatty():
            typer.echo(f"{model}, {llm.max_model_len:,} tokens of context. /help lists the commands.")
        Repl(llm, messages=messages, system=system, sampling=sampling, tools=tools).run()


@app.command(rich_help_panel="Use")
def render(
    file: Annotated[str | None, typer.Argument(help="JSON file; '-' or nothing reads stdin.")] = None,
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Show the tokens that a model reads for a chat; nothing is generated.

    The file holds a list of messages, or a request as it is sent to
    /v1/chat/completions, with tools and tool_choice. Control tokens are
    coloured and marked with a star: text of a message never is one.

      [cyan]k3 render chat.json -m qwen2.5-coder-0.5b[/cyan]
      [cyan]echo '[{"role": "user", "content": "Hello"}]' | k3 render --json[/cyan]
    """
    from openk3.chat.tokenizer import Tokenizer
    from openk3.render import read_request, rendered, rendered_text

    if file is None and sys.stdin.isatty():
        raise ValueError("no messages: k3 render FILE, or pipe JSON in")
    where = "stdin" if file in (None, "-") else str(file)
    request = read_request(_read_stdin() if where == "stdin" else _read_file(where), where)
    card = rendered(Tokenizer.from_directory(_fetch(model)), **request)
    print_json({"model": model, **card}) if as_json else typer.echo(rendered_text(card))


@app.command(rich_help_panel="Serve")
def serve(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="TCP port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="The model's id in the API.", show_default="model")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", help="Host name that requests may come in under; may be repeated."),
    ] = None,
    web: Annotated[bool, typer.Option("--web/--no-web", help="Serve the web chat at / too.")] = True,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Replies that may wait; beyond that the server says 503.")
    ] = 256,
    log_format: Annotated[
        Literal["auto", "json", "plain"],
        typer.Option("--log", help="Log lines on stderr.", show_default="plain on a terminal, else json"),
    ] = "auto",
    mcp_config: McpConfig = None,
    mcp_endpoint: Annotated[
        bool, typer.Option("--mcp-endpoint", help="Offer calculator and datetime to MCP clients at /mcp.")
    ] = False,
    kv_cache_mb: Annotated[
        int, typer.Option("--kv-cache-mb", min=1, help="Memory for keys and values, which cached prefixes fill up.")
    ] = 2048,
    threads: Threads = None,
    weights: Weights = "auto",
) -> None:
    """Serve a model: web chat at /, OpenAI-compatible API at /v1.

    On an address other than 127.0.0.1 the server asks everybody for an API
    key, so there must be one: k3 keys create.

      [cyan]k3 serve[/cyan]                          then open http://127.0.0.1:8000
      [cyan]k3 serve -m qwen2.5-coder-0.5b --port 8080[/cyan]
      [cyan]k3 serve --host 0.0.0.0 --allowed-host my.machine[/cyan]
    """
    _fetch(model)
    from openk3.serve.app import run

    run(
        model,
        host=host,
        port=port,
        model_name=name,
        web=web,
        allowed_hosts=allowed_host or (),
        max_queue=max_queue,
        log_format=log_format,
        num_threads=threads,
        engine=EngineConfig(weights=weights, kv_cache_bytes=kv_cache_mb << 20),
        mcp_config=mcp_config,
        mcp_endpoint=mcp_endpoint,
    )


app.add_typer(keys_app, name="keys", rich_help_panel="Serve")
app.command(rich_help_panel="Serve")(usage)
app.command(rich_help_panel="Serve")(mcp)
app.command(rich_help_panel="Use")(search)


@app.command(rich_help_panel="This machine")
def doctor(as_json: AsJson = False) -> None:
    """Show what this machine has, what is missing, and the command that fixes it.

    The exit code is 1 if something is missing that OpenK3 cannot do without.
    """
    from openk3.doctor import diagnose, healthy, report_json, report_text

    with spinner("looking around"):
        checks = diagnose()
    print_json(report_json(checks)) if as_json else typer.echo(report_text(checks))
    if not healthy(checks):
        raise typer.Exit(1)


_SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "max_tokens", "stop",
)  # fmt: skip


def _sampling(ctx: typer.Context) -> dict[str, Any]:
    """The sampling options of a command by the names of the SDK, checked before a model is loaded for nothing."""
    from openk3.engine.request import SamplingParams

    given = {name: ctx.params[name] for name in _SAMPLING_NAMES if ctx.params[name] not in (None, [])}
    SamplingParams(**given)
    return given


def _load(name: str, threads: int | None, weights: WeightFormat) -> LLM:
    _fetch(name)
    with spinner(f"loading {name}"):
        from openk3.llm import load

        return load(name, num_threads=threads, engine=EngineConfig(weights=weights), progress=False)


def _fetch(name: str) -> Path:
    """The model's directory, fetched with a progress bar if need be; says at once if there is no such model."""
    from openk3.weights import resolve

    return resolve(name, progress=sys.stderr.isatty())


def _compile() -> None:
    """Have the kernels compiled."""
    from openk3.engine.compiled import compile_kernels

    with spinner("compiling"):
        compile_kernels()


def _prompt_text(prompt: str | None, file: str | None) -> str:
    """The prompt, then the file; stdin for either one that is '-', or where neither is given."""
    if prompt == "-" and file == "-":
        raise ValueError("prompt and --file are both '-': stdin can be read only once")
    if prompt is None and file is None:
        if sys.stdin.isatty():
            raise ValueError('no prompt: k3 generate "...", or pipe a text in')
        prompt = "-"
    parts = [_read_stdin() if prompt == "-" else prompt, _read_stdin() if file == "-" else file and _read_file(file)]
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _read_stdin() -> str:
    return _text(sys.stdin.buffer.read(), "stdin")


def _read_file(file: str) -> str:
    return _text(Path(file).expanduser().read_bytes(), file)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})") from None


def _end(piece: Piece) -> dict[str, Any]:
    """What the last piece of an answer tells about the whole."""
    assert piece.usage is not None and piece.timings is not None
    return {"finish_reason": piece.finish_reason, "usage": asdict(piece.usage), "timings": asdict(piece.timings)}


def main() -> None:
    """The `k3` program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the program was started with it closed
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (open until the end)
    app(prog_name="k3")
