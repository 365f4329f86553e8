"""Ask a trace directly: its tables are Parquet. The same trace through DuckDB, pandas and polars.

    pip install duckdb pandas polars
    python samples/trace_queries.py TRACE

docs/trace-schema.md has every column. A row with `warmup` set, or `profiled`, is not part of steady-state figures.
"""

import argparse
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl


def time_by_phase(trace: Path) -> duckdb.DuckDBPyRelation:
    """DuckDB: what each phase did and how long a pass took."""
    passes = f"{trace}/passes/**/*.parquet"
    return duckdb.sql(
        f"""
        select phase,
               count(*)::bigint                                            as passes,
               sum(prefill_tokens + decode_tokens)::bigint                 as tokens,
               round(median(host_ns) / 1e6, 3)                             as median_ms,
               round(100 * sum(host_ns) / sum(sum(host_ns)) over (), 1)    as share_percent
        from read_parquet('{passes}', hive_partitioning = true)
        where warmup is null and not profiled and error is null
        group by phase
        order by phase
        """
    )


def latencies(trace: Path) -> pd.DataFrame:
    """pandas: latency percentiles over the requests."""
    requests = pd.read_parquet(trace / "requests")
    steady = requests[requests["warmup"].isna()]
    in_ms = steady[["ttft_ns", "tpot_ns"]].astype("float64") / 1e6
    in_ms.columns = ["ttft_ms", "tpot_ms"]
    return in_ms.quantile([0.5, 0.9, 0.99]).round(3)


def decode_by_context(trace: Path) -> pl.DataFrame:
    """polars: how the time of a decode pass grows with the tokens that it attends to."""
    return (
        pl.scan_parquet(f"{trace}/passes/**/*.parquet", hive_partitioning=True)
        .filter(pl.col("phase") == "decode", pl.col("warmup").is_null(), ~pl.col("profiled"))
        .with_columns((pl.col("context_tokens") // 64 * 64).alias("context_from"))
        .group_by("context_from")
        .agg(
            pl.len().alias("passes"),
            (pl.col("host_ns").median() / 1e6).round(3).alias("median_ms"),
        )
        .sort("context_from")
        .collect()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    trace = parser.parse_args().trace
    if not (trace / "passes").is_dir():
        parser.error(f"{trace} is not a trace: it has no passes")
    print(time_by_phase(trace))
    print(latencies(trace))
    print(decode_by_context(trace))


if __name__ == "__main__":
    main()
