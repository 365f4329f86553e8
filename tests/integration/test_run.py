"""`phaseprof run`: the command stays what it was, and what cannot be recorded is said. Real processes throughout."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from phaseprof.trace.reader import open_trace

RUN = [sys.executable, "-m", "phaseprof", "run"]
QUIET = [*RUN, "--no-report", "--"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("PYTHONPATH", "PHASEPROF_TRACE", "PHASEPROF_NOTES", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def _run(
    command: Sequence[str | Path], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, input=stdin, capture_output=True, timeout=120, env={**os.environ, **(env or {})}
    )


def _wrapped(
    *command: str | Path, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return _run([*QUIET, *command], stdin=stdin, env=env)


def _script(name: str, code: str) -> Path:
    path = Path.cwd().parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


# The command is what it was


@pytest.mark.parametrize(
    ("shell", "code"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)],
)
def test_the_exit_code_is_the_commands(shell: str, code: int) -> None:
    assert _wrapped("sh", "-c", shell).returncode == code


def test_stdin_and_stdout_pass_byte_for_byte() -> None:
    data = bytes(range(256)) * 5000 + b"no newline at the end"
    result = _wrapped("cat", stdin=data)
    assert result.stdout == data
    assert result.returncode == 0


def test_descriptors_beyond_the_three_are_inherited() -> None:
    result = subprocess.run(
        ["sh", "-c", '"$@" 3>log', "sh", *QUIET, "sh", "-c", "echo through >&3"],
        capture_output=True,
        timeout=60,
    )
    assert result.returncode == 0
    assert Path("log").read_text() == "through\n"


@pytest.mark.parametrize("separator", [["--"], []], ids=["dashes", "no-dashes"])
def test_arguments_with_dashes_are_the_scripts(separator: list[str]) -> None:
    script = _script("args.py", "import sys\nprint(sys.argv[1:])\n")
    arguments = ["-o", "x", "--report", "--", "-- --", "--help", ""]
    result = _run([*RUN, "--no-report", *separator, script, *arguments])
    assert result.stdout.decode() == f"{arguments}\n"


def test_a_script_that_raises_keeps_its_traceback_and_its_exit_code() -> None:
    script = _script("fails.py", "def inner():\n    raise ValueError('of the script')\ninner()\n")
    plain = _run([sys.executable, script])
    result = _wrapped(script)
    assert result.returncode == plain.returncode == 1
    assert result.stderr.startswith(plain.stderr)
    assert result.stderr.removeprefix(plain.stderr).startswith(b"phaseprof: ")
    assert result.stdout == b""


STATE = """
import json, os, sys
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "flags": list(sys.flags), "executable": sys.executable,
    "prefix": sys.prefix, "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "usercustomize": "usercustomize" in sys.modules, "cwd": os.getcwd(),
    "signals": [str(__import__("signal").getsignal(n)) for n in (1, 2, 3, 10, 13, 15, 17, 28)],
}))
"""


PATHS = [None, "", "/a", ":/a", "/a:", "/a::/b", "."]


@pytest.mark.parametrize(
    ("how", "pythonpath", "safe_path"),
    [("script", path, safe) for path in PATHS for safe in (False, True)]
    + [(how, path, False) for how in ("code", "module") for path in (None, ":/a")],
)
def test_python_finds_the_world_as_without_us(
    how: str, pythonpath: str | None, safe_path: bool
) -> None:
    script = _script("state.py", STATE)
    commands: dict[str, list[str | Path]] = {
        "script": [sys.executable, script],
        "code": [sys.executable, "-c", STATE],
        "module": [sys.executable, "-m", "state"],
    }
    command = commands[how]
    env = {"PYTHONSAFEPATH": "1"} if safe_path else {}
    if pythonpath is not None:
        env["PYTHONPATH"] = pythonpath
    if how == "module":
        Path("state.py").write_text(STATE)
    plain, result = _run(command, env=env), _wrapped(*command, env=env)
    assert plain.returncode == result.returncode == 0
    assert json.loads(result.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nprint('own sitecustomize', __name__, sys.path[0], file=sys.stderr)\n",
        "raise RuntimeError('of the sitecustomize')\n",
        "import a_module_that_is_missing\n",
    ],
    ids=["runs", "raises", "imports-what-is-missing"],
)
def test_an_existing_sitecustomize_runs_as_if_it_were_alone(code: str) -> None:
    folder = _script("site/sitecustomize.py", code).parent
    command = [sys.executable, "-c", STATE]
    env = {"PYTHONPATH": str(folder)}
    plain, result = _run(command, env=env), _wrapped(*command, env=env)
    assert plain.stderr  # each of them says something
    assert result.stderr.startswith(plain.stderr)
    assert json.loads(result.stdout) == json.loads(plain.stdout)


def test_an_existing_usercustomize_runs() -> None:
    folder = _script("user/usercustomize.py", "print('own usercustomize')\n").parent
    # A virtual environment has no user site: this needs the interpreter that it was made from.
    python = str(getattr(sys, "_base_executable", sys.executable))
    command = [python, "-c", "import sys; print(sys.path)"]
    env = {"PYTHONPATH": str(folder)}
    plain, result = _run(command, env=env), _wrapped(*command, env=env)
    assert plain.stdout.startswith(b"own usercustomize\n")
    assert result.stdout == plain.stdout


def test_a_module_and_a_console_script_run() -> None:
    data = b'{"a": 1}'
    assert _wrapped("-m", "json.tool", "--compact", stdin=data).stdout == b'{"a":1}\n'
    _script("bin/tool", f"#!{sys.executable}\nimport sys\nprint('tool', sys.argv[1:])\n").chmod(
        0o755
    )
    path = f"{Path.cwd().parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = _wrapped("tool", "--x", env={"PATH": path})
    assert result.stdout == b"tool ['--x']\n"
    assert b"the Python process never imported transformers" in result.stderr


def test_a_script_without_a_first_line_is_run_by_sh() -> None:
    _script("bare", "echo ran with $1\n").chmod(0o755)
    assert _wrapped("../bare", "one").stdout == b"ran with one\n"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["no-such-program"], 127, "no-such-program: command not found."),
        (["../no-such-file"], 127, "../no-such-file: no such file."),
        (["no_such_script.py"], 127, "no_such_script.py: command not found."),
        (["/"], 126, "/ is a folder."),
        (["../not-executable"], 126, "permission denied"),
        (["../bad-first-line"], 127, "the interpreter that its first line names, does not exist"),
        ([], 2, "no command to run"),
    ],
)
def test_a_command_that_cannot_run_is_one_clear_line(
    command: list[str], code: int, said: str
) -> None:
    _script("not-executable", "").chmod(0o644)
    _script("bad-first-line", "#!/no/such/interpreter\n").chmod(0o755)
    result = _wrapped(*command)
    assert result.returncode == code
    message, remedy = result.stderr.decode().splitlines()
    assert message.startswith("phaseprof: ") and said in message
    assert remedy
    assert list(Path.cwd().iterdir()) == []


def test_a_folder_that_is_not_empty_is_refused_before_the_command_runs() -> None:
    Path("t").mkdir()
    Path("t/something").touch()
    result = _run([*RUN, "-o", "t", "--", "touch", "ran"])
    assert result.returncode == 2
    assert b"t is not empty" in result.stderr
    assert not Path("ran").exists()


def test_the_commands_of_one_job_share_a_folder_and_the_first_one_reports() -> None:
    write = ["sh", "-c", 'mkdir -p t/passes && touch "t/passes/$SLURM_PROCID.parquet"']
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    tasks = [_run([*RUN, "-o", "t", "--", *write], env={**step, "SLURM_PROCID": r}) for r in "01"]
    assert [task.returncode for task in tasks] == [0, 0]
    assert sorted(part.name for part in Path("t/passes").iterdir()) == ["0.parquet", "1.parquet"]
    assert b"the trace is in" not in tasks[0].stderr
    assert b"the trace is in" in tasks[1].stderr
    other = _run([*RUN, "-o", "t", "--", *write], env={**step, "SLURM_STEP_ID": "1"})
    assert other.returncode == 2
    assert b"t is not empty" in other.stderr


def test_a_misspelt_option_is_a_usage_error() -> None:
    result = _run([*RUN, "--reprot", "--", "touch", "ran"])
    assert result.returncode == 2
    assert b"--reprot" in result.stderr
    assert not Path("ran").exists()


# Signals

COUNT = """
import signal, sys, time
count = {}
def handler(number, frame):
    count[number] = count.get(number, 0) + 1
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), handler)
print("ready", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end and not count:
    time.sleep(0.01)
time.sleep(0.4)
print(sorted(count.items()), flush=True)
sys.exit(9)
"""


@contextlib.contextmanager
def _started(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A wrapped command in a process group of its own, from the moment that it says that it is ready."""
    with subprocess.Popen(
        [*QUIET, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("whole_group", [False, True], ids=["to-phaseprof", "to-the-group"])
def test_a_signal_reaches_the_command_once(name: str, whole_group: bool) -> None:
    number = getattr(signal, name)
    with _started(_script("count.py", COUNT), name) as process:
        (os.killpg if whole_group else os.kill)(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert output.decode() == f"[({int(number)}, 1)]\n"
    assert process.returncode == 9


def test_a_command_that_a_forwarded_signal_kills_gives_its_code() -> None:
    with _started("sh", "-c", "echo ready; exec sleep 30") as process:
        process.terminate()
        assert process.wait(timeout=30) == 143


def test_nothing_of_ours_outlives_a_phaseprof_that_is_killed() -> None:
    with _started("sh", "-c", "echo ready; exec sleep 300") as process:
        members = psutil.Process(process.pid).children(recursive=True)
        assert len(members) == 2  # the witness and the command
        process.kill()
        process.wait(timeout=30)
        _, alive = psutil.wait_procs(members, timeout=1)
        commands = [p for p in alive if p.name() == "sleep"]
        for command in commands:
            command.kill()
        _, left = psutil.wait_procs([p for p in alive if p not in commands], timeout=30)
    assert len(commands) == 1
    assert left == []


def test_an_ignored_signal_stays_ignored() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    result = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *QUIET, sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
    )
    assert result.stdout == b"True\n"


def test_on_a_terminal_it_is_a_terminal_and_ctrl_c_arrives_once() -> None:
    code = "import sys\nprint([f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)])\n" + COUNT
    script = _script("count_on_tty.py", code)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(QUIET[0], [*QUIET, str(script), "SIGINT"])
    output = b""
    sent = False
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        try:
            block = os.read(terminal, 4096)
        except OSError:  # EIO: the last process that had the terminal has ended
            break
        output += block
        if not sent and b"ready" in output:
            sent = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert b"[True, True, True]" in output
    assert b"[(2, 1)]" in output
    assert os.waitstatus_to_exitcode(status) == 9


def test_no_process_and_no_file_is_left_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = "import os; print(os.getppid(), len(os.listdir(os.environ['TMPDIR'])))"
    result = _wrapped(sys.executable, "-c", code, env={"TMPDIR": str(scratch)})
    parent, notes = result.stdout.split()
    assert notes == b"1"
    assert list(scratch.iterdir()) == []
    assert list(Path.cwd().iterdir()) == []
    # The witness has ended with its parent.
    with pytest.raises(ProcessLookupError):
        os.kill(int(parent), 0)


# What is recorded, and what is not and why

# Stands for the engine and for the session, to see without loading torch which processes would record.
FAKE_ENGINE = {
    "transformers/__init__.py": "from . import tokenization\n",
    "transformers/tokenization.py": "",
    "transformers/modeling_utils.py": "value = 'executed'\n",
}
FAKE_SESSION = """
import os, sys, types
session = types.ModuleType("phaseprof.session")
def start_process_session(trace, *, lazily):
    from phaseprof.process import ProcessPlace
    rank = ProcessPlace().now().rank
    assert sys.modules["transformers.modeling_utils"].value == "executed"
    (trace / f"{os.getpid()}-{os.getppid()}-{rank}").touch()
    session.trace = trace
    session.whole_process = True
    session.current = lambda: session
session.start_process_session = start_process_session
session.current = lambda: None
sys.modules["phaseprof.session"] = session
__import__("phaseprof").session = session
"""


@pytest.fixture
def fake_engine() -> dict[str, str]:
    for name, code in FAKE_ENGINE.items():
        _script(f"fake/{name}", code)
    _script("fake/sitecustomize.py", FAKE_SESSION)
    return {"PYTHONPATH": str(Path.cwd().parent / "fake")}


def _sessions(code: str, env: Mapping[str, str]) -> list[tuple[bool, int]]:
    """Runs a script and returns, for each session, whether it ran in the command's own process, and its rank."""
    script = _script("program.py", "import os\nprint(os.getpid(), flush=True)\n" + code)
    result = _run([*RUN, "--no-report", "-o", "t", "--", script], env=env)
    assert result.returncode == 0, result.stderr.decode()
    own = result.stdout.split()[0].decode()
    names = [p.name.split("-") for p in Path("t").iterdir()] if Path("t").exists() else []
    return sorted((pid == own, int(rank)) for pid, _, rank in names)


def test_a_session_starts_when_the_engine_has_been_imported(fake_engine: dict[str, str]) -> None:
    assert _sessions("import transformers.modeling_utils\n", fake_engine) == [(True, 0)]


def test_the_engine_without_its_models_starts_nothing(fake_engine: dict[str, str]) -> None:
    script = _script("tokens.py", "import transformers\n")
    result = _wrapped(script, env=fake_engine)
    assert b"transformers was imported by the Python process, but no model class" in result.stderr
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_children_start_their_own(method: str, fake_engine: dict[str, str]) -> None:
    code = f"""
import multiprocessing as mp
def work():
    import transformers.modeling_utils
if __name__ == "__main__":
    context = mp.get_context({method!r})
    workers = [context.Process(target=work) for _ in range(2)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    assert [w.exitcode for w in workers] == [0, 0]
"""
    assert _sessions(code, fake_engine) == [(False, 0), (False, 0)]


def test_subprocesses_inherit_and_have_their_launchers_rank(fake_engine: dict[str, str]) -> None:
    code = """
import subprocess, sys
for rank in ("0", "1", "x"):
    subprocess.run([sys.executable, "-m", "transformers.modeling_utils"], check=True)
    subprocess.run([sys.executable, "-c", "import transformers.modeling_utils"],
                   env={**os.environ, "RANK": rank}, check=True)
"""
    assert _sessions(code, fake_engine) == [(False, 0), (False, 0), (False, 1)]


def test_torchrun_workers_have_their_ranks(fake_engine: dict[str, str]) -> None:
    worker = _script("worker.py", "import transformers.modeling_utils\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = _run([*RUN, "--no-report", "-o", "t", "--", *launcher, worker], env=fake_engine)
    assert result.returncode == 0, result.stderr.decode()
    assert sorted(p.name.split("-")[2] for p in Path("t").iterdir()) == ["0", "1"]


def test_a_child_with_a_cleaned_environment_is_not_seen(fake_engine: dict[str, str]) -> None:
    code = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "import transformers.modeling_utils"],
               env={{"PYTHONPATH": {fake_engine["PYTHONPATH"]!r}}}, check=True)
"""
    assert _sessions(code, fake_engine) == []


def test_a_nested_run_takes_over_and_the_outer_one_says_so(fake_engine: dict[str, str]) -> None:
    script = _script("program.py", "import transformers.modeling_utils\n")
    inner: list[str | Path] = [*RUN, "--no-report", "-o", "inner", "--", script]
    result = _run([*RUN, "--no-report", "-o", "outer", "--", *inner], env=fake_engine)
    assert b"took over" in result.stderr
    assert len(list(Path("inner").iterdir())) == 1
    assert not Path("outer").exists()


def test_a_phaseprof_command_keeps_its_own_trace(fake_engine: dict[str, str]) -> None:
    code = "import phaseprof.cli, transformers.modeling_utils"
    result = _run([*RUN, "-o", "t", "--", sys.executable, "-c", code], env=fake_engine)
    assert b"the model ran in a phaseprof command, which keeps its own trace" in result.stderr
    assert not Path("t").exists()


def test_a_session_that_cannot_start_leaves_the_program_alone(fake_engine: dict[str, str]) -> None:
    _script(
        "fake/sitecustomize.py", FAKE_SESSION.replace("session.trace = trace", "1/0  # in the way")
    )
    script = _script("program.py", "import transformers.modeling_utils\nprint('ran to its end')\n")
    result = _wrapped(script, env=fake_engine)
    assert result.returncode == 0
    assert result.stdout == b"ran to its end\n"
    assert b"recording could not begin (ZeroDivisionError" in result.stderr


@pytest.mark.parametrize("report", [True, False])
def test_what_comes_after_a_recording_leaves_the_exit_code(
    report: bool, fake_engine: dict[str, str]
) -> None:
    _script(
        "fake/sitecustomize.py",
        FAKE_SESSION.replace(
            "session.trace = trace",
            "session.trace = trace; (trace / 'passes').mkdir(); (trace / 'passes/no.parquet').touch()",
        ),
    )
    script = _script("program.py", "import sys, transformers.modeling_utils\nsys.exit(3)\n")
    option = "--report" if report else "--no-report"
    result = _run([*RUN, option, "-o", "t", "--", script], env=fake_engine)
    assert result.returncode == 3
    assert result.stdout == b""
    trace = Path.cwd() / "t"
    if report:  # a file that is no Parquet file: there is nothing to report
        assert result.stderr.startswith(b"phaseprof: ")
        assert b"Traceback" not in result.stderr
    else:
        assert result.stderr.decode() == (
            f"phaseprof: the trace is in {trace} · phaseprof report {trace}\n"
        )


@pytest.mark.parametrize(
    ("options", "effect"),
    [("-I", "ignores PYTHONPATH"), ("-E", "ignores PYTHONPATH"), ("-S", "skips the site module")],
)
def test_options_that_keep_the_hook_out_are_said(options: str, effect: str) -> None:
    result = _wrapped(sys.executable, options, "-c", "print('ran')")
    assert result.returncode == 0
    assert result.stdout == b"ran\n"
    assert f"runs Python with {options}, which {effect}" in result.stderr.decode()
    assert f"Run it without {options}" in result.stderr.decode()

    _script("tool", f"#!{sys.executable} {options}\nprint('ran')\n").chmod(0o755)
    assert f"with {options}, which {effect}" in _wrapped("../tool").stderr.decode()


def test_an_environment_without_phaseprof_is_said() -> None:
    folder = Path.cwd().parent / "other env"
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    result = _wrapped(python, "-c", "print('ran')")
    assert result.returncode == 0
    assert result.stdout == b"ran\n"
    message, remedy = result.stderr.decode().splitlines()
    assert f"phaseprof is not installed for {python}, Python {sys.version.split()[0]}" in message
    assert remedy == f"{python} -m pip install phaseprof"


def test_a_program_without_python_is_said() -> None:
    result = _wrapped("true")
    assert result.returncode == 0
    assert b"no Python process was seen under true" in result.stderr


# With the real engine

LLAMA = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256)).eval()
"""


def test_an_unmodified_script_is_recorded_and_reported() -> None:
    script = _script(
        "generate.py",
        LLAMA
        + "options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)\n"
        + "print(model.generate(torch.arange(3, 12)[None], **options).tolist())\n"
        + "sys.exit(5)\n",
    )
    plain = _run([sys.executable, script])
    result = _run([*RUN, "-o", "t", "--", script])
    assert result.returncode == plain.returncode == 5
    assert result.stdout == plain.stdout

    passes = open_trace(Path("t")).passes.to_pylist()
    assert [(p["phase"], p["prefill_tokens"], p["decode_tokens"]) for p in passes] == [
        ("prefill", 9, 0),
        *[("decode", 0, 1)] * 5,
    ]
    said = result.stderr.decode()
    assert "LlamaForCausalLM" in said and "decode" in said
    assert str(Path.cwd() / "t") in " ".join(said.split())


def test_a_model_that_is_never_called_is_said() -> None:
    script = _script("loads.py", LLAMA)
    result = _wrapped(script)
    assert result.returncode == 0
    message, remedy = result.stderr.decode().splitlines()
    assert message.startswith(
        "phaseprof: No forward pass was seen. Hooks were set on transformers 5."
    )
    assert "generate" in message
    assert "phaseprof run --" in remedy
