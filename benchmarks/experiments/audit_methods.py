"""Audits every method on MNIST 8x8 and writes the figures that `fleetdistill methods` and the docs show.

    FLEETDISTILL_DATA=data python benchmarks/experiments/audit_methods.py --seeds 0 1 2

1,500 rows on five devices, alpha 0.5; for each device 60 rows among 999 others of their class. Every method has the
settings and the device models of its defaults, and five rounds or its own number. The rows of all seeds are one sample
for the interval. Pictures are those of the first seed, with decoders from MNIST and from scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fleetdistill_console.commands.methods import AUDIT_FILE, audit_figures, worst
from fleetdistill_lab.audit.audit import Audit, AuditReport, record_run, report
from fleetdistill_lab.audit.linkage import wilson
from fleetdistill_lab.audit.pictures import reconstruct
from fleetdistill_lab.audit.public_set import kinds_of_images, read_public, split_public
from fleetdistill_server.config.run_config import RunConfig, run_config

FORMS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "cdkt": ("cdkt", "", {}),
    "classstats": ("classstats", "", {}),
    "classstats_private": ("classstats_private", "", {"epsilon": 3.0}),
    "classstats_private, epsilon = 1": ("classstats_private", "", {"epsilon": 1.0}),
    "classstats_secure": ("classstats_secure", "", {"epsilon": 3.0}),
    "classstats_secure, epsilon = 1": ("classstats_secure", "", {"epsilon": 1.0}),
    "classstats_summed": ("classstats_summed", "", {}),
    "dafkd": ("dafkd", "", {}),
    "fedavg": ("fedavg", "", {}),
    "fedd2s": ("fedd2s", "fedd2s_digits", {}),
    "feddkc": ("feddkc", "", {}),
    "feddkc, labels = false": ("feddkc", "", {"labels": False}),
    "feddkd": ("feddkd", "", {}),
    "feddkd, batches of 8": ("feddkd", "digits_cnn_small", {"dkd_batch_size": 8}),
    "feddkd, batches of 1": ("feddkd", "digits_cnn_small", {"dkd_batch_size": 1}),
}
"""Method, device model and settings by name."""


def config_of(form: str) -> RunConfig:
    """The run.toml of a form, for 8x8 images of ten classes."""
    method, device, settings = FORMS[form]
    return run_config(
        {
            "run": {"name": "audit", "method": method},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "model": {"device": device},
            "method": settings,
            "server": {"torch_device": "cpu"},
        }
    )


def measure(form: str, data: str, other: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The figures of one form over all seeds."""
    reports, pictures = [], []
    config = config_of(form)
    public_data = read_public(data, config.contract)
    for seed in seeds:
        wanted = Audit(config=config, data=public_data, seed=seed)
        public = split_public(public_data, wanted.rows, seed)
        recorded = record_run(wanted, public)
        reports.append(report(wanted, public, recorded))
        if seed == seeds[0]:
            kinds = kinds_of_images(public, other, config.contract)
            pictures = [
                {"part": item.part, "source": item.source, "pictures": len(item.pictures), **rounded(item.figures())}
                for item in reconstruct(recorded, public, kinds)
            ]
    classes = [report.classes for report in reports if report.classes is not None]
    return {
        "attacks": pooled(reports),
        "classes": round(statistics.mean(classes), 2) + 0.0 if classes else None,  # no -0.0
        "bound": None if reports[0].bound is None else round(reports[0].bound, 4),
        "pictures": pictures,
    }


def pooled(reports: Sequence[AuditReport]) -> list[dict[str, Any]]:
    """The results of each attack over all seeds, with the interval over all rows."""
    result: list[dict[str, Any]] = []
    for part, attacks in reports[0].parts.items():
        for attack in attacks:
            results = [report.parts[part][attack] for report in reports if attack in report.parts[part]]
            rows = sum(result.rows for result in results)
            mean = {
                name: round(sum(getattr(result, name) * result.rows for result in results) / rows, 3)
                for name in ("linked", "auc", "tpr1")
            }
            interval = wilson(round(sum(result.linked * result.rows for result in results)), rows)
            limits = [round(item, 3) for item in interval]
            result.append({"part": part, "attack": attack, **mean, "interval": limits, "rows": rows})
        result += [] if attacks else [{"part": part, "attack": None}]
    return result


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures with two decimals."""
    return {name: round(value, 2) for name, value in figures.items()}


def print_tables(forms: Mapping[str, Any]) -> None:
    """The tables of docs/explanation/privacy.md."""
    print("| method | strongest attack | linked | 95 % | auc | tpr1 | classes |\n|---|---|---|---|---|---|---|")
    for form, result in forms.items():
        one, classes = worst(form), "–" if result["classes"] is None else f"{result['classes']:.2f}"
        if one is None:
            print(f"| {form} | none |  |  |  |  | {classes} |")
            continue
        low, high = one["interval"]
        numbers = f"{one['linked']:.3f} | {low:.3f} to {high:.3f} | {one['auc']:.3f} | {one['tpr1']:.3f}"
        print(f"| {form} | {one['part']}: {one['attack']} | {numbers} | {classes} |")
    print("\n| method | made from | SSIM | PSNR in dB | reidentified |\n|---|---|---|---|---|")
    for form, result in forms.items():
        for one in result["pictures"]:
            numbers = f"{one['ssim']:.2f} | {one['psnr']:.1f} | {one['reidentified']:.2f}"
            print(f"| {form} | {one['source']} | {numbers} |")


def main() -> None:
    """Measures the forms and writes the file."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--other", default="digits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--out", type=Path, default=AUDIT_FILE, help="by default the file of the package")
    parser.add_argument("--tables", action="store_true", help="only print the tables of the package's figures")
    given = parser.parse_args()
    if given.tables:
        print_tables(audit_figures()["forms"])
        return
    known = json.loads(given.out.read_text()) if given.out.exists() else {"forms": {}}
    for form in given.forms:
        started = time.monotonic()
        known["forms"][form] = measure(form, given.data, given.other, given.seeds)
        known |= {"data": given.data, "other": given.other, "seeds": given.seeds}
        ordered = {**known, "forms": dict(sorted(known["forms"].items()))}
        given.out.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{form}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
