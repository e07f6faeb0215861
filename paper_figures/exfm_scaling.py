"""QPS of the ExFM-like workload over GPUs: published points and the cost model, full model parallelism and 2D."""

import matplotlib.pyplot as plt
from style import SERIES, powers_of_two, read, save, use_style

LAYOUTS = {"full_mp": "full model parallelism", "sparse_2d": "2D, N = 256"}


def main() -> None:
    """Draw ``results/tables/exfm_scaling.csv``: QPS for each GPU, and memory of the fullest GPU."""
    use_style()
    table = read("exfm_scaling")
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(8.4, 3.6))
    for (layout, name), style in zip(LAYOUTS.items(), SERIES, strict=False):
        rows = table[table["parallelism"] == layout]
        paper, modelled = rows[rows["label"] == "paper"], rows[rows["label"] == "modelled"]
        speed.plot(
            paper["num_gpus"], paper["qps"] / paper["num_gpus"], **style | {"linestyle": ""}, label=f"{name} (paper)"
        )
        speed.plot(
            modelled["num_gpus"],
            modelled["qps"] / modelled["num_gpus"],
            **style | {"marker": "", "alpha": 0.8},
            label=f"{name} (modelled)",
        )
        fitted = modelled[(modelled["role"] == "fit") & modelled["qps"].notna()]
        speed.plot(
            fitted["num_gpus"],
            fitted["qps"] / fitted["num_gpus"],
            "o",
            ms=11,
            mfc="none",
            mec="0.6",
            label="fitted on these" if layout == "full_mp" else None,
        )
        # Without the marker, which stands for published points.
        memory.plot(modelled["num_gpus"], modelled["peak_memory_pct"], **style | {"marker": "", "alpha": 0.8})
    memory.axhline(92, color="0.4", linewidth=0.8)
    memory.annotate("usable (assumed)", (270, 94), color="0.4", fontsize=8)
    for axes in (speed, memory):
        powers_of_two(axes, table["num_gpus"])
        axes.set_xlabel("GPUs T")
    speed.set_ylim(0, 760)
    speed.set_ylabel("QPS for each GPU")
    memory.set_ylabel("memory of the fullest GPU, % (modelled)")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    save(figure, "exfm_scaling")


if __name__ == "__main__":
    main()
