"""Parameters fitted to measured operations. Generated; this writes it:

    python benchmarks/efficiency_fit.py ../shared/measured -o benchmarks/results/efficiency_fit.json --write

The measurements are those of ai-dynamo/aiconfigurator (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator):
H100 SXM: products and attention under vLLM 0.24.0, aiconfigurator.
A100 SXM 80 GB: products under vLLM 0.14.0, aiconfigurator.
Half of each table was fitted; spreads are of the other half. docs/efficiency.md tells what the parameters mean, and
benchmarks/results/efficiency_fit.json has the errors by size, which a test compares with the ones here.
"""

from __future__ import annotations

from collections.abc import Mapping

from phaseprof.analyzers.efficiency.parameters import (
    AttentionFit,
    FittedAttention,
    FittedGemm,
    FittedGpu,
    GemmFit,
    Hardware,
    Spread,
    Tile,
)

H100_SXM = FittedGpu(
    board="H100 SXM",
    hardware=Hardware(units=132, flops_per_s=9.89e14, bytes_per_s=3.35e12, cache_bytes=52428800),
    gemm={
        "bfloat16": FittedGemm(
            fit=GemmFit(
                tiles=(
                    Tile(rows=64, columns=16, from_rows=1, to_rows=2147483648),
                    Tile(rows=64, columns=32, from_rows=1, to_rows=2147483648),
                    Tile(rows=64, columns=64, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=64, from_rows=1, to_rows=2147483648),
                    Tile(rows=64, columns=128, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=128, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=256, from_rows=1, to_rows=2147483648),
                    Tile(rows=256, columns=128, from_rows=1, to_rows=2147483648),
                ),
                splits=(
                    1,
                    2,
                    4,
                    8,
                    16,
                ),
                element_bytes=2.0,
                compute_share=0.854,
                bandwidth_share=0.882,
                load_bytes_per_s=1.45e11,
                tile_s=1.23e-06,
                fixed_s=1.57e-06,
                overlap=2.32,
                tile_overlap=20.0,
                wave_rounding=0.02,
                split_s=2.55e-06,
                reduce_bytes_per_s=1.66e13,
                quantize_row_s=0.0,
                quantize_per_s=0.0,
            ),
            flops_per_s=9.89e14,
            spreads={
                "all": Spread(low=0.844, high=1.177, median_error=0.051, points=17908),
                "m 16-64": Spread(low=0.907, high=1.167, median_error=0.0397, points=1694),
                "m 16-64, 10-100 us": Spread(low=0.93, high=1.167, median_error=0.034, points=612),
                "m 16-64, < 10 us": Spread(low=0.895, high=1.155, median_error=0.0502, points=914),
                "m 257-1024": Spread(low=0.78, high=1.21, median_error=0.0818, points=1452),
                "m 257-1024, 10-100 us": Spread(
                    low=0.763, high=1.277, median_error=0.1027, points=644
                ),
                "m 257-1024, < 10 us": Spread(
                    low=0.896, high=1.188, median_error=0.0494, points=495
                ),
                "m 257-1024, > 100 us": Spread(
                    low=0.745, high=1.05, median_error=0.1385, points=313
                ),
                "m 65-256": Spread(low=0.851, high=1.171, median_error=0.0552, points=3872),
                "m 65-256, 10-100 us": Spread(
                    low=0.844, high=1.17, median_error=0.0648, points=1555
                ),
                "m 65-256, < 10 us": Spread(low=0.9, high=1.174, median_error=0.0463, points=1861),
                "m < 16": Spread(low=0.893, high=1.155, median_error=0.0401, points=3630),
                "m < 16, 10-100 us": Spread(
                    low=0.922, high=1.158, median_error=0.0294, points=1290
                ),
                "m < 16, < 10 us": Spread(low=0.88, high=1.142, median_error=0.0515, points=1980),
                "m > 1024": Spread(low=0.825, high=1.198, median_error=0.0527, points=7260),
                "m > 1024, 10-100 us": Spread(
                    low=0.757, high=1.218, median_error=0.0611, points=2806
                ),
                "m > 1024, < 10 us": Spread(
                    low=0.849, high=1.227, median_error=0.0537, points=1171
                ),
                "m > 1024, > 100 us": Spread(
                    low=0.842, high=1.156, median_error=0.0457, points=3283
                ),
            },
        ),
        "float8_e4m3fn": FittedGemm(
            fit=GemmFit(
                tiles=(
                    Tile(rows=64, columns=64, from_rows=1, to_rows=64),
                    Tile(rows=64, columns=128, from_rows=65, to_rows=128),
                    Tile(rows=128, columns=128, from_rows=129, to_rows=2147483648),
                ),
                splits=(1,),
                element_bytes=1.0,
                compute_share=0.728,
                bandwidth_share=0.826,
                load_bytes_per_s=6.05e11,
                tile_s=5.56e-07,
                fixed_s=2.91e-06,
                overlap=2.02,
                tile_overlap=13.4,
                wave_rounding=1.0,
                split_s=0.0,
                reduce_bytes_per_s=0.0,
                quantize_row_s=7.25e-09,
                quantize_per_s=4.43e11,
            ),
            flops_per_s=1.979e15,
            spreads={
                "all": Spread(low=0.84, high=1.287, median_error=0.0718, points=17908),
                "m 16-64": Spread(low=0.873, high=1.27, median_error=0.0654, points=1694),
                "m 16-64, 10-100 us": Spread(low=0.88, high=1.319, median_error=0.0643, points=783),
                "m 16-64, < 10 us": Spread(low=0.879, high=1.166, median_error=0.0665, points=785),
                "m 257-1024": Spread(low=0.806, high=1.479, median_error=0.1108, points=1452),
                "m 257-1024, 10-100 us": Spread(
                    low=0.835, high=1.415, median_error=0.0877, points=983
                ),
                "m 257-1024, < 10 us": Spread(low=1.086, high=1.4, median_error=0.1552, points=167),
                "m 257-1024, > 100 us": Spread(
                    low=0.786, high=1.595, median_error=0.1714, points=302
                ),
                "m 65-256": Spread(low=0.811, high=1.296, median_error=0.0767, points=3872),
                "m 65-256, 10-100 us": Spread(
                    low=0.83, high=1.118, median_error=0.0586, points=2241
                ),
                "m 65-256, < 10 us": Spread(
                    low=1.008, high=1.373, median_error=0.0879, points=1156
                ),
                "m 65-256, > 100 us": Spread(
                    low=0.773, high=1.043, median_error=0.1393, points=475
                ),
                "m < 16": Spread(low=0.845, high=1.125, median_error=0.0701, points=3630),
                "m < 16, 10-100 us": Spread(
                    low=0.892, high=1.126, median_error=0.0357, points=1643
                ),
                "m < 16, < 10 us": Spread(low=0.84, high=1.133, median_error=0.0948, points=1717),
                "m > 1024": Spread(low=0.866, high=1.298, median_error=0.0659, points=7260),
                "m > 1024, 10-100 us": Spread(
                    low=0.884, high=1.201, median_error=0.0581, points=3592
                ),
                "m > 1024, > 100 us": Spread(
                    low=0.849, high=1.415, median_error=0.0804, points=3668
                ),
            },
        ),
        "float8_block": FittedGemm(
            fit=GemmFit(
                tiles=(
                    Tile(rows=64, columns=64, from_rows=1, to_rows=64),
                    Tile(rows=64, columns=128, from_rows=65, to_rows=128),
                    Tile(rows=128, columns=128, from_rows=129, to_rows=2147483648),
                ),
                splits=(1,),
                element_bytes=1.0,
                compute_share=0.811,
                bandwidth_share=0.92,
                load_bytes_per_s=1.06e11,
                tile_s=1e-08,
                fixed_s=2.91e-06,
                overlap=2.43,
                tile_overlap=4.27,
                wave_rounding=1.0,
                split_s=0.0,
                reduce_bytes_per_s=0.0,
                quantize_row_s=1.19e-08,
                quantize_per_s=4.87e11,
            ),
            flops_per_s=1.979e15,
            spreads={
                "all": Spread(low=0.584, high=1.188, median_error=0.0525, points=4025),
                "m 257-1024": Spread(low=0.629, high=1.311, median_error=0.0897, points=237),
                "m 257-1024, > 100 us": Spread(
                    low=0.629, high=1.311, median_error=0.0897, points=237
                ),
                "m 65-256": Spread(low=0.485, high=1.086, median_error=0.1478, points=400),
                "m 65-256, > 100 us": Spread(
                    low=0.485, high=1.086, median_error=0.1478, points=400
                ),
                "m > 1024": Spread(low=0.732, high=1.182, median_error=0.0484, points=2977),
                "m > 1024, > 100 us": Spread(
                    low=0.732, high=1.182, median_error=0.0484, points=2977
                ),
            },
        ),
    },
    prefill={
        2: FittedAttention(
            fit=AttentionFit(
                compute_share={64: 0.54, 128: 0.796, 192: 0.95, 256: 0.905, 512: 0.451},
                bandwidth_share=0.97,
                cache_bytes_per_s=3.12e12,
                load_bytes_per_s=8.14e10,
                tile_s=1.91e-06,
                query_bytes_per_s=5.11e10,
                window_s=1.05e-07,
                fixed_s=8.96e-06,
                overlap=1.26,
                tile_overlap=2.29,
                wave_rounding=0.638,
                split_s=1.3e-05,
                write_bytes_per_s=2.19e12,
                write_token_s=6.52e-10,
            ),
            spreads={
                "15-50 us": Spread(low=0.828, high=1.23, median_error=0.0606, points=3290),
                "50-500 us": Spread(low=0.857, high=1.379, median_error=0.0671, points=4235),
                "< 15 us": Spread(low=0.825, high=1.109, median_error=0.0455, points=2172),
                "> 500 us": Spread(low=0.808, high=1.169, median_error=0.0455, points=3053),
                "all": Spread(low=0.832, high=1.266, median_error=0.0549, points=12750),
            },
        ),
        1: FittedAttention(
            fit=AttentionFit(
                compute_share={64: 0.607, 128: 0.67, 192: 0.636, 256: 0.508},
                bandwidth_share=0.97,
                cache_bytes_per_s=3.51e12,
                load_bytes_per_s=8.48e10,
                tile_s=1.24e-06,
                query_bytes_per_s=2.7e10,
                window_s=3.03e-07,
                fixed_s=9.97e-06,
                overlap=1.02,
                tile_overlap=2.59,
                wave_rounding=1.0,
                split_s=2e-05,
                write_bytes_per_s=1.25e12,
                write_token_s=9.3e-10,
            ),
            spreads={
                "15-50 us": Spread(low=0.856, high=1.231, median_error=0.0791, points=3716),
                "50-500 us": Spread(low=0.831, high=1.406, median_error=0.1015, points=4138),
                "< 15 us": Spread(low=0.849, high=1.196, median_error=0.0528, points=1331),
                "> 500 us": Spread(low=0.761, high=1.215, median_error=0.0588, points=3208),
                "all": Spread(low=0.825, high=1.304, median_error=0.0763, points=12393),
            },
        ),
    },
    decode={
        2: FittedAttention(
            fit=AttentionFit(
                compute_share={64: 0.95, 128: 0.904, 192: 0.95, 256: 0.669},
                bandwidth_share=0.965,
                cache_bytes_per_s=4.93e12,
                load_bytes_per_s=6.21e10,
                tile_s=1.18e-06,
                query_bytes_per_s=1.93e11,
                window_s=2.38e-06,
                fixed_s=9.18e-06,
                overlap=3.31,
                tile_overlap=9.25,
                wave_rounding=0.556,
                split_s=3.28e-06,
                write_bytes_per_s=1.39e11,
                write_token_s=1.14e-08,
            ),
            spreads={
                "15-50 us": Spread(low=0.857, high=1.278, median_error=0.0713, points=4838),
                "50-500 us": Spread(low=0.862, high=1.173, median_error=0.0582, points=3218),
                "< 15 us": Spread(low=0.881, high=1.142, median_error=0.0514, points=6753),
                "all": Spread(low=0.873, high=1.188, median_error=0.0608, points=14956),
            },
        ),
        1: FittedAttention(
            fit=AttentionFit(
                compute_share={64: 0.95, 128: 0.708, 192: 0.519, 256: 0.386},
                bandwidth_share=0.97,
                cache_bytes_per_s=4.62e12,
                load_bytes_per_s=5.71e10,
                tile_s=6.91e-07,
                query_bytes_per_s=1.48e11,
                window_s=2.73e-06,
                fixed_s=1.05e-05,
                overlap=20.0,
                tile_overlap=6.92,
                wave_rounding=1.0,
                split_s=3.28e-06,
                write_bytes_per_s=6.9e10,
                write_token_s=9.2e-09,
            ),
            spreads={
                "15-50 us": Spread(low=0.896, high=1.256, median_error=0.0596, points=7717),
                "50-500 us": Spread(low=0.808, high=1.189, median_error=0.0648, points=3012),
                "< 15 us": Spread(low=0.881, high=1.133, median_error=0.0688, points=4137),
                "all": Spread(low=0.865, high=1.207, median_error=0.0621, points=14956),
            },
        ),
    },
    source="products and attention under vLLM 0.24.0, aiconfigurator",
)

A100_SXM = FittedGpu(
    board="A100 SXM 80 GB",
    hardware=Hardware(units=108, flops_per_s=3.12e14, bytes_per_s=2.04e12, cache_bytes=41943040),
    gemm={
        "bfloat16": FittedGemm(
            fit=GemmFit(
                tiles=(
                    Tile(rows=64, columns=32, from_rows=1, to_rows=2147483648),
                    Tile(rows=64, columns=64, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=64, from_rows=1, to_rows=2147483648),
                    Tile(rows=64, columns=128, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=128, from_rows=1, to_rows=2147483648),
                    Tile(rows=128, columns=256, from_rows=1, to_rows=2147483648),
                    Tile(rows=256, columns=128, from_rows=1, to_rows=2147483648),
                ),
                splits=(
                    1,
                    2,
                    4,
                    8,
                    16,
                ),
                element_bytes=2.0,
                compute_share=0.95,
                bandwidth_share=0.899,
                load_bytes_per_s=8.13e10,
                tile_s=3.49e-06,
                fixed_s=5.02e-07,
                overlap=1.56,
                tile_overlap=20.0,
                wave_rounding=1.0,
                split_s=1.69e-06,
                reduce_bytes_per_s=3.18e12,
                quantize_row_s=0.0,
                quantize_per_s=0.0,
            ),
            flops_per_s=3.12e14,
            spreads={
                "all": Spread(low=0.743, high=1.217, median_error=0.0669, points=4599),
                "m 16-64": Spread(low=0.784, high=1.192, median_error=0.0576, points=876),
                "m 16-64, 10-100 us": Spread(
                    low=0.893, high=1.194, median_error=0.0472, points=383
                ),
                "m 16-64, < 10 us": Spread(low=0.709, high=1.197, median_error=0.0675, points=380),
                "m 257-1024": Spread(low=0.779, high=1.253, median_error=0.0726, points=876),
                "m 257-1024, 10-100 us": Spread(
                    low=0.771, high=1.241, median_error=0.0588, points=405
                ),
                "m 257-1024, < 10 us": Spread(low=0.8, high=1.288, median_error=0.1042, points=172),
                "m 257-1024, > 100 us": Spread(
                    low=0.778, high=1.293, median_error=0.0768, points=299
                ),
                "m 65-256": Spread(low=0.778, high=1.213, median_error=0.0775, points=1314),
                "m 65-256, 10-100 us": Spread(
                    low=0.842, high=1.208, median_error=0.0696, points=614
                ),
                "m 65-256, < 10 us": Spread(low=0.78, high=1.215, median_error=0.0718, points=454),
                "m 65-256, > 100 us": Spread(
                    low=0.689, high=1.157, median_error=0.1281, points=246
                ),
                "m < 16": Spread(low=0.671, high=1.217, median_error=0.0727, points=876),
                "m < 16, 10-100 us": Spread(low=0.846, high=1.209, median_error=0.0634, points=373),
                "m < 16, < 10 us": Spread(low=0.655, high=1.244, median_error=0.1035, points=391),
                "m > 1024": Spread(low=0.805, high=1.223, median_error=0.0461, points=657),
                "m > 1024, 10-100 us": Spread(
                    low=0.794, high=1.22, median_error=0.0677, points=184
                ),
                "m > 1024, > 100 us": Spread(
                    low=0.861, high=1.186, median_error=0.0301, points=424
                ),
            },
        )
    },
    prefill={},
    decode={},
    source="products under vLLM 0.14.0, aiconfigurator",
)

#: Measured over modelled time of products on one of the GPUs by the parameters of the other.
SCALED: Mapping[str, Spread] = {
    "all": Spread(low=0.578, high=1.444, median_error=0.2702, points=22507),
    "m 16-64": Spread(low=0.618, high=1.534, median_error=0.225, points=2570),
    "m 16-64, 10-100 us": Spread(low=0.726, high=1.34, median_error=0.2038, points=1052),
    "m 16-64, < 10 us": Spread(low=0.608, high=1.681, median_error=0.3042, points=1215),
    "m 257-1024": Spread(low=0.53, high=1.637, median_error=0.3547, points=2328),
    "m 257-1024, 10-100 us": Spread(low=0.522, high=1.57, median_error=0.3946, points=1103),
    "m 257-1024, < 10 us": Spread(low=0.626, high=1.773, median_error=0.3727, points=571),
    "m 257-1024, > 100 us": Spread(low=0.491, high=1.232, median_error=0.2063, points=654),
    "m 65-256": Spread(low=0.608, high=1.513, median_error=0.3454, points=5186),
    "m 65-256, 10-100 us": Spread(low=0.59, high=1.427, median_error=0.3471, points=2394),
    "m 65-256, < 10 us": Spread(low=0.612, high=1.688, median_error=0.3742, points=2038),
    "m 65-256, > 100 us": Spread(low=0.634, high=1.194, median_error=0.2335, points=754),
    "m < 16": Spread(low=0.606, high=1.355, median_error=0.2244, points=4506),
    "m < 16, 10-100 us": Spread(low=0.743, high=1.295, median_error=0.1992, points=1814),
    "m < 16, < 10 us": Spread(low=0.595, high=1.449, median_error=0.3166, points=2157),
    "m > 1024": Spread(low=0.537, high=1.152, median_error=0.2634, points=7917),
    "m > 1024, 10-100 us": Spread(low=0.507, high=1.221, median_error=0.4075, points=3044),
    "m > 1024, < 10 us": Spread(low=0.58, high=1.288, median_error=0.4257, points=867),
    "m > 1024, > 100 us": Spread(low=0.573, high=1.131, median_error=0.1313, points=4006),
}
