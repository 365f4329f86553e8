"""Nsight Systems exports: databases of known content, a real one of two devices, and damaged ones."""

from __future__ import annotations

import gzip
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from phaseprof.collectors.files import nsys
from phaseprof.collectors.files.contents import Contents, Marker
from phaseprof.collectors.files.joinery import Joinery, LaunchRow
from phaseprof.collectors.files.nsys_database import opened, refuse_report
from phaseprof.collectors.files.nsys_metrics import Sampled, SampleRow
from phaseprof.collectors.files.source import Bytes
from phaseprof.errors import TraceError
from phaseprof.importing.run import Options, import_files
from phaseprof.metrics import Metric
from phaseprof.trace.reader import open_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
BEGAN_NS = 1_700_000_000_000_000_000
KEY_A, KEY_B = (1 << 24) | 100, (1 << 24) | 200
STRINGS = {
    1: "cudaLaunchKernel_v7000",
    2: "cudaGraphLaunch_v10000",
    3: "cudaStreamSynchronize_v3020",
    4: "void gemm<float>(float*)",
    5: "flash_attn",
    6: "execute_context_1(7)_generation_0(0)",
    7: "NCCL",
    8: "cudaMemcpyAsync_v3020",
}
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, systemClockNs INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, gridX INTEGER, gridY INTEGER, gridZ INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
    copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL,
    deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL,
    text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, smCount INTEGER, totalMemory INTEGER,
    memoryBandwidth INTEGER, computeMajor INTEGER, computeMinor INTEGER, uuid TEXT,
    cuDevice INTEGER, pwGpuId INTEGER);
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, metricId INTEGER, metricName TEXT);
CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER);
"""
TRT = "[Executor] _forward_step 12: 1 ctx reqs, 40 ctx tokens, 3 gen reqs"


def export(path: Path) -> Path:
    """Two processes with equal correlation ids, each on its device; the second one replays graphs."""
    with sqlite3.connect(path) as database:
        database.executescript(SCHEMA)
        put = database.executemany
        put("INSERT INTO StringIds VALUES (?,?)", STRINGS.items())
        put("INSERT INTO META_DATA_EXPORT VALUES (?,?)", [("EXPORT_PRODUCT_VERSION", "2026.2")])
        put("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?,?)", [(BEGAN_NS, 5)])
        a, b = (KEY_A << 24) | 101, (KEY_B << 24) | 201
        put(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)",
            [
                (1000, 1010, a, 7, 1),
                (1020, 1030, a, 8, 1),
                (1040, 1050, a, 9, 8),
                (1060, 1070, a, 10, 3),
                (2000, 2010, b, 7, 2),
                (2100, 2110, b, 8, 2),
            ],
        )
        put(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            [
                (1100, 1150, 0, 7, 7, KEY_A << 24, 4, 2, 1, 1, None),
                (1150, 1250, 0, 7, 8, KEY_A << 24, 5, 3, 2, 1, None),
                (2200, 2230, 1, 13, 7, KEY_B << 24, 4, 2, 1, 1, 55),
                (2230, 2270, 1, 13, 7, KEY_B << 24, 5, 2, 1, 1, 56),
            ],
        )
        put(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?,?)",
            [(1260, 1300, 0, 7, 9, KEY_A << 24, 1, 0, 2)],
        )
        put(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?,?,?,?,?,?,?)",
            [(2300, 2900, 1, 13, 8, KEY_B << 24, 3)],
        )
        put(
            "INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?)",
            [
                (0, None, 75, "NCCL", a, None, 4),
                (990, 1075, 59, None, a, 6, 0),
                (1041, 1049, 59, "ncclAllReduce", a, None, 4),
                (991, 1000, 59, "aten::mm, seq = 4", a, None, 0),
                (992, 1001, 59, "prefill, op_id = 12", a, None, 0),
                (993, None, 59, "never ended", a, None, 0),
                (994, None, 34, "a mark", a, None, 0),
                (1990, 2120, 60, TRT, b, None, 2),
            ],
        )
        put(
            "INSERT INTO TARGET_INFO_GPU VALUES (?,?,?,?,?,?,?,?,?,?)",
            [
                (0, "NVIDIA H100", 132, 85 << 30, 3_000_000_000_000, 9, 0, "aa-0", 0, 1),
                (1, "NVIDIA H100", 132, 85 << 30, 3_000_000_000_000, 9, 0, "aa-1", 1, 0),
            ],
        )
        type_1 = 0x1000100000001
        put(
            "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?,?,?)",
            [
                (type_1, 1, "SMs Active [Throughput %]"),
                (type_1, 2, "Tensor Active [Throughput %]"),
                (type_1, 3, "DRAM Read Bandwidth [Throughput %]"),
                (type_1, 4, "DRAM Write Bandwidth [Throughput %]"),
                (type_1, 5, "GPC Clock Frequency [MHz]"),
                (type_1, 6, "PCIe RX Throughput [Throughput %]"),
            ],
        )
        put(
            "INSERT INTO GPU_METRICS VALUES (?,?,?,?)",
            [
                *((1000, type_1, number, value) for number, value in READINGS.items()),
                (2000, type_1, 1, 250),
                (3000, type_1, 1, 10),
            ],
        )
    database.close()
    return path


READINGS = {1: 90, 2: 40, 3: 50, 4: 10, 5: 1980, 6: 3}


def read(path: Path, tmp: Path) -> dict[int, tuple[Contents, list[Marker], Joinery, list[str]]]:
    """By process: contents, markers, the joinery, and the damage that showed."""
    found = {}
    with opened(Bytes(path), path, tmp) as database:
        for process in nsys.processes(database):
            joinery = Joinery(tmp)
            contents = nsys.read(
                database, process, joinery, wants_marker=lambda name: "flash" in name
            )
            found[process.pid] = contents, joinery.markers(), joinery, list(database.damage)
    return found


def launches(joinery: Joinery) -> dict[int, LaunchRow]:
    return {row.correlation: row for part in joinery.partitions() for row in part.launch_rows()}


def busy(joinery: Joinery) -> Counter[tuple[str, int]]:
    """Summed time by name and device."""
    found: Counter[tuple[str, int]] = Counter()
    for part in joinery.partitions():
        for row in part.event_rows():
            found[joinery.names[row.name], row.device] += row.duration_ns
    return found


def test_two_processes_keep_their_equal_correlation_ids_apart(tmp_path: Path) -> None:
    found = read(export(tmp_path / "x.sqlite"), tmp_path)
    assert list(found) == [100, 200]
    contents, markers, joinery, damage = found[100]
    assert busy(joinery) == {
        ("void gemm<float>(float*)", 0): 50,
        ("flash_attn", 0): 100,
        ("Memcpy HtoD (Pageable -> Device)", 0): 40,
    }
    assert launches(joinery)[7] == (7, 1000, 101, joinery.name("cudaLaunchKernel"))
    assert sorted(launches(joinery)) == [7, 8, 9]
    assert [(each.grid, each.launch, each.start_ns) for each in markers] == [
        ((3, 2, 1), 8, BEGAN_NS + 1150)
    ]
    assert (contents.epoch, contents.start_ns) == (True, BEGAN_NS + 990)
    assert joinery.shift_ns == BEGAN_NS
    assert contents.left_out.unmatched == 1
    assert damage == []
    own = contents.devices[0]
    assert (own.number, own.name, own.cores, own.capability) == (0, "NVIDIA H100", 132, (9, 0))
    assert own.uuid == "GPU-aa-0"


def test_graphs_of_nodes_and_as_a_whole(tmp_path: Path) -> None:
    contents, _, joinery, _ = read(export(tmp_path / "x.sqlite"), tmp_path)[200]
    assert busy(joinery) == {
        ("void gemm<float>(float*)", 1): 30,
        ("flash_attn", 1): 40,
        (nsys.WHOLE_GRAPH, 1): 600,
    }
    assert joinery.names[launches(joinery)[8].name] == "cudaGraphLaunch"
    assert any("CUDA graphs (1 launched)" in each.what for each in contents.lacking)


def test_ranges_of_engines_and_users_without_those_of_libraries_and_operators(
    tmp_path: Path,
) -> None:
    found = read(export(tmp_path / "x.sqlite"), tmp_path)
    assert [
        (each.name, each.start_ns - BEGAN_NS, each.end_ns - BEGAN_NS, each.thread_id, each.process)
        for each in (*found[100][0].annotations, *found[200][0].annotations)
    ] == [
        ("execute_context_1(7)_generation_0(0)", 990, 1075, 101, 100),
        ("prefill", 992, 1001, 101, 100),
        (TRT, 1990, 2120, 201, 200),
    ]


def sampled_of(path: Path, tmp: Path) -> tuple[list[SampleRow], Sampled]:
    sampled = Sampled()
    with opened(Bytes(path), path, tmp) as database:
        return list(nsys.samples(database, sampled)), sampled


def test_counters_become_shares_bytes_and_hertz_of_the_right_device(tmp_path: Path) -> None:
    rows, sampled = sampled_of(export(tmp_path / "x.sqlite"), tmp_path)
    # The counters' own number 1 is device 0 of CUDA.
    assert {(row.start_ns - BEGAN_NS, row.end_ns - BEGAN_NS, row.device) for row in rows} == {
        (1000, 2000, 0)
    }
    assert {row.metric: row.value for row in rows} == pytest.approx(
        {
            Metric.SM_ACTIVE: 0.9,
            Metric.TENSOR_ACTIVE: 0.4,
            Metric.DRAM_ACTIVE: 0.6,
            Metric.DRAM_READ: 1.5e12,
            Metric.DRAM_WRITE: 0.3e12,
            Metric.SM_CLOCK: 1.98e9,
        }
    )
    assert sampled.impossible == 1
    assert list(sampled.unmapped) == ["PCIe RX Throughput [Throughput %]"]
    assert len(list(sampled.lacking())) == 2


def test_counters_as_generic_events(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE GENERIC_EVENT_SOURCES (sourceId INTEGER, data TEXT);
            CREATE TABLE GENERIC_EVENT_TYPES (typeId INTEGER, sourceId INTEGER, data TEXT);
            CREATE TABLE GENERIC_EVENTS (rawTimestamp INTEGER, typeId INTEGER, data TEXT);
            INSERT INTO GENERIC_EVENT_SOURCES VALUES (1, '{"Name":"GpuMetrics"}'), (2, '{"Name":"ETW"}');
            INSERT INTO GENERIC_EVENT_TYPES VALUES (256, 1, ''), (257, 2, '');
            INSERT INTO GENERIC_EVENTS VALUES
                (100, 256, '{"SM Active":"55","Tensor Active":"20"}'), (150, 257, '{"SM Active":"9"}'),
                (200, 256, '{"SM Active":"50"}'), (300, 256, 'no JSON');
            """
        )
    database.close()
    rows, _ = sampled_of(path, tmp_path)
    assert rows == [
        (100, 200, 0, Metric.SM_ACTIVE, 0.55),
        (100, 200, 0, Metric.TENSOR_ACTIVE, 0.2),
    ]


def test_an_export_of_2020_has_no_process_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / "2020.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
            INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel'), (2, 'k');
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
                correlationId INT, nameId INT);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (10, 20, 281476838981743, 5, 1);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT,
                correlationId INT, shortName INT);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (30, 45, 0, 7, 5, 2);
            """
        )
        contents, _, joinery, _ = read(path, tmp_path)[0]
        assert (contents.epoch, contents.start_ns, contents.end_ns) == (False, 10, 45)
        assert busy(joinery) == {("k", 0): 15}
        assert list(launches(joinery)) == [5]
        assert any("NVTX" in each.what for each in contents.lacking)
        # With a second process, equal ids would mean nothing.
        database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (10, 20, 281476855758960, 5, 1)"
        )
    database.close()
    contents, _, joinery, _ = read(path, tmp_path)[0]
    assert launches(joinery) == {}
    assert any("which step" in each.what for each in contents.lacking)


def test_values_of_wrong_types_are_counted(tmp_path: Path) -> None:
    path = export(tmp_path / "x.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE start = 1100")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 'x' WHERE start = 1150")
        database.execute("UPDATE NVTX_EVENTS SET globalTid = x'00ff' WHERE start = 990")
        database.execute("UPDATE StringIds SET value = x'ff' WHERE id = 4")
    database.close()
    contents, _, joinery, _ = read(path, tmp_path)[100]
    assert (contents.left_out.no_time, contents.left_out.bad_device) == (1, 1)
    assert set(busy(joinery)) == {("Memcpy HtoD (Pageable -> Device)", 0)}


def test_missing_tables_are_said(tmp_path: Path) -> None:
    path = export(tmp_path / "x.sqlite")
    with sqlite3.connect(path) as database:
        for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "TARGET_INFO_GPU"):
            database.execute(f"DROP TABLE {table}")
    database.close()
    contents, _, joinery, _ = read(path, tmp_path)[100]
    assert joinery.launches == 0
    assert [each.what for each in contents.lacking] == [
        "ranges of NVTX",
        "which step a kernel is of",
    ]
    assert contents.devices[0].name == ""


def test_other_databases_and_empty_exports(tmp_path: Path) -> None:
    for statement, message in (
        ("CREATE TABLE songs (title TEXT)", "no export of Nsight Systems"),
        ("CREATE TABLE StringIds (id INTEGER, value TEXT)", "no kernels, no launches"),
    ):
        path = tmp_path / f"{len(message)}.sqlite"
        with sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()
        with pytest.raises(TraceError, match=message):
            read(path, tmp_path)


@pytest.mark.parametrize("name", ["run.nsys-rep", "RUN.QDREP", "a.qdstrm"])
def test_reports_are_named_with_what_exports_them(name: str) -> None:
    with pytest.raises(TraceError, match="only nsys reads") as error:
        refuse_report(name)
    assert "nsys export --type sqlite" in error.value.remedy
    refuse_report("run.sqlite")


def test_cut_and_overwritten_files_raise_nothing_else_and_leave_nothing(tmp_path: Path) -> None:
    whole = export(tmp_path / "x.sqlite").read_bytes()
    damaged = said = 0
    folder = tmp_path / "t"
    folder.mkdir()
    for number in range(60):
        data = bytearray(whole)
        place = 100 + number * len(whole) // 61
        if number % 2:
            data[place : place + 200] = b"\xff" * 200
        else:
            del data[place:]
        path = tmp_path / "damaged.sqlite.gz"
        path.write_bytes(gzip.compress(bytes(data), 1))
        damaged += 1
        try:
            said += any(each[3] for each in read(path, folder).values())
        except TraceError:
            said += 1
        assert list(folder.iterdir()) == []
    assert said > damaged / 2


def test_a_description_of_tables_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """SQLite quotes it in its message, which then is no text either."""
    whole = export(tmp_path / "x.sqlite").read_bytes()
    place = whole.index(b"(", whole.index(b"CREATE TABLE"))
    path = tmp_path / "damaged.sqlite"
    path.write_bytes(whole[:place] + b"\xe3" * 3 + whole[place + 3 :])
    with pytest.raises(TraceError, match="damaged SQLite file"):
        read(path, tmp_path)


def test_the_real_export_of_two_devices(tmp_path: Path) -> None:
    path = SHARED / "nsys-h100-2gpu-training.sqlite.gz"
    if not path.exists():
        pytest.skip(f"the shared recordings are not here ({path})")
    found = read(path, tmp_path)
    by_device: Counter[int] = Counter()
    kernels = copies = launchless = 0
    for _, _, joinery, _ in found.values():
        for part in joinery.partitions():
            for row in part.event_rows():
                name = joinery.names[row.name]
                kernels += not name.startswith(("Memcpy", "Memset"))
                copies += name.startswith("Memcpy")
                if not name.startswith(("Memcpy", "Memset")):
                    by_device[row.device] += row.duration_ns
        own = launches(joinery)
        launchless += sum(
            row.correlation not in own and not joinery.names[row.name].startswith("Mem")
            for part in joinery.partitions()
            for row in part.event_rows()
        )
    assert (kernels, copies) == (3442, 904)
    assert by_device == {0: 22_385_163, 1: 22_444_359}
    plain = tmp_path / "plain.sqlite"
    with gzip.open(path) as packed, open(plain, "wb") as file:
        shutil.copyfileobj(packed, file)
    database = sqlite3.connect(plain)
    (truth,) = database.execute(
        "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k WHERE NOT EXISTS (SELECT 1 FROM "
        "CUPTI_ACTIVITY_KIND_RUNTIME r WHERE r.correlationId = k.correlationId "
        "AND r.globalTid / 16777216 * 16777216 = k.globalPid)"
    ).fetchone()
    database.close()
    assert launchless == truth
    assert {pid: each[2].events for pid, each in read(plain, tmp_path).items()} == {
        pid: each[2].events for pid, each in found.items()
    }


def test_an_export_becomes_a_trace_with_a_rank_for_each_process(tmp_path: Path) -> None:
    trace = tmp_path / "T"
    trace.mkdir()
    found = import_files([str(export(tmp_path / "x.sqlite"))], trace, Options()).ranks
    assert [(each.rank, dict(each.passes)) for each in found] == [
        (0, {"prefill": 1}),
        (1, {"mixed": 1}),
    ]
    assert all(each.joined.between == each.joined.launchless == 0 for each in found)
    read = open_trace(trace)
    kernels = read.kernels.to_pylist()
    passes = {row["pass_id"]: row["phase"] for row in read.passes.to_pylist()}
    busy_ns: Counter[tuple[str, str]] = Counter()
    for row in kernels:
        assert row["source"] == "nsys"
        busy_ns[passes[row["pass_id"]], row["device"]] += row["end_ns"] - row["start_ns"]
    assert busy_ns == {("prefill", "cuda:0"): 190, ("mixed", "cuda:1"): 670}
    samples = read.samples.to_pylist()
    assert {(row["device"], row["source"], row["start_ns"]) for row in samples} == {
        ("GPU-aa-0", "nsys", BEGAN_NS + 1000)
    }
    assert len(samples) == 6
    assert {path.name for path in trace.iterdir()} <= {"meta", "kernels", "passes", "samples"}
