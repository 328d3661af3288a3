"""An app's own network on raw inputs, distilled from what one exchange of class statistics says of the device's rows.

    python benchmarks/experiments/own_network.py digits --seeds 0 1 2
    python benchmarks/experiments/own_network.py fashion-14 --seeds 0 1 --data-dir data

Each device trains its network on its own rows alone: with their labels (alone), and with the personal or the general
answer to every row that it sees, changed rows included (crops, noise, mirror images), so that the teacher answers for
what the student sees. `--search` tries settings, for seeds from 100 on. Results are appended to a file as they come;
`--table` prints them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_exchange import RANK, SETTINGS, exchange, personal, read
from one_exchange_controls import falling, log_softmax
from one_exchange_fleet import Fleet, Part, accuracies, make_fleet
from one_exchange_tables import paired, spread
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import (
    best_temperature,
    class_prior,
    coordinates,
    leave_one_out,
    logits,
    projection,
)
from fleetdistill.models import build_model
from fleetdistill.models.scattering import scattering
from fleetdistill.seeds import derive_seed

MODELS = {
    "digits": ("digits_linear", "digits_mlp_small", "digits_mlp_large", "digits_cnn_small", "digits_cnn_large"),
    "fashion-14": ("resnet2", "resnet4", "resnet6", "resnet10", "resnet12"),
}
FIGURES = ("all", "own", "prior_own", "joint_all", "joint_own")
_SCALE = 0.2
DRAWING_STEPS, DRAWING_RATE = 30, 0.05
MIRROR = {"digits": False, "fashion-14": True}


@dataclass(frozen=True)
class Lesson:
    """How a network is trained.

    Attributes:
        teacher: Whose answer it learns beside the labels; None for the labels alone.
        changed: Whether rows are shifted, mirrored and made noisy anew in every step.
        weight: Of the teacher's part of the loss, in [0, 1]; the labels' part has the rest.
        temperature: That the teacher's and the student's answers are softened by.
        epochs: Over own rows.
        rate: Falls to a tenth.
        shift: Pixels that a row is moved by at most, either way.
        noise: Standard deviation of what is added to every pixel.
        turn: Degrees that a row is turned by at most, either way, when it is also sheared and scaled by up to a fifth.
        drawn: Images that the device draws: own rows, changed until the class space has them at a drawn point.
        mixed: Share of each batch that is a blend of two own rows, which no label fits; taught by the teacher alone.
    """

    teacher: str | None = None
    changed: bool = False
    weight: float = 0.9
    temperature: float = 2.0
    epochs: int = 60
    rate: float = 0.05
    shift: int = 1
    noise: float = 0.05
    turn: float = 0.0
    drawn: int = 0
    mixed: float = 0.0


LESSONS = {
    "alone": Lesson(),
    "alone, changed rows": Lesson(changed=True),
    "from the personal answer": Lesson("personal"),
    "from the personal answer, changed rows": Lesson("personal", changed=True),
    "from the general answer": Lesson("general"),
    "from the general answer, changed rows": Lesson("general", changed=True),
    "from the general answer, changed rows and drawn images": Lesson("general", changed=True, drawn=600),
}


class Teacher(nn.Module):
    """Images to the closed form's logits, float32."""

    def __init__(self, shape: tuple[int, ...], space: ClassSpace, dimensions: int, classes: int) -> None:
        super().__init__()
        self.extractor = scattering(shape)
        with torch.no_grad():
            numbers = self.extractor(torch.zeros(1, *shape)).numel()
        whole = projection(numbers, dimensions).astype(np.float64) @ space.directions.astype(np.float64)
        self.directions = torch.tensor(whole, dtype=torch.float32)
        self.origin = torch.tensor(space.origin.astype(np.float32))
        self.space, self.classes = space, classes

    def forward(self, images: Tensor) -> Tensor:
        result = self.coordinates(images)
        return torch.from_numpy(logits(self.space, result.double().numpy(), self.classes)).float()

    def coordinates(self, images: Tensor) -> Tensor:
        """v, `[n, q]`."""
        return self.extractor(images).flatten(1) @ self.directions - self.origin


def drawn_images(teacher: Teacher, images: Tensor, count: int, seed: int) -> Tensor:
    """Own rows, each changed by Adam until the class space has it where a row of a drawn class would be.

    It is how a device without a row of a class comes by inputs that the fleet takes for that class: b_c and standard
    normal noise are drawn in the space, and the scattering can be differentiated.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor(teacher.space.centres.astype(np.float32))
    at = torch.randint(len(centres), (count,), generator=generator)
    wanted = centres[at] + torch.randn(count, centres.shape[1], generator=generator)
    result = images[torch.randint(len(images), (count,), generator=generator)].clone().requires_grad_(True)
    optimizer = torch.optim.Adam([result], lr=DRAWING_RATE)
    for _ in range(DRAWING_STEPS):
        optimizer.zero_grad()
        for rows in torch.arange(count).split(250):
            (teacher.coordinates(result[rows]) - wanted[rows]).square().mean(dim=1).sum().backward()
        optimizer.step()
        result.data.clamp_(0, 1)
    return result.detach()


def train(
    model: nn.Module,
    part: Part,
    lesson: Lesson,
    teach: Callable[[Tensor], Tensor],
    drawn: Tensor | None,
    mirror: bool,
    seed: int,
) -> None:
    """Labels and, where the lesson has a teacher, its answers to the very rows that the network sees."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(part.labels)
    batch = min(32, len(labels))
    steps = lesson.epochs * (len(labels) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=lesson.rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    known = teach(part.images) if lesson.teacher and not lesson.changed else None
    order = torch.empty(0, dtype=torch.int64)
    model.train()
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(labels), generator=generator)
        rows, order = order[:batch], order[batch:]
        images = changed(part.images[rows], lesson, mirror, generator) if lesson.changed else part.images[rows]
        blends = round(lesson.mixed * batch)
        if blends:
            images = torch.cat([blended(images[:blends], images.flip(0)[:blends], generator), images[blends:]])
        if drawn is not None:
            some = drawn[torch.randint(len(drawn), (batch,), generator=generator)]
            images = torch.cat([images, changed(some, lesson, False, generator)])
        targets = labels[rows]
        for group in optimizer.param_groups:
            group["lr"] = falling(lesson.rate, step, steps)
        optimizer.zero_grad()
        result = model(images)
        loss = functional.cross_entropy(result[blends:batch], targets[blends:])
        if lesson.teacher:
            answers = teach(images) if known is None else known[rows]
            loss = (1 - lesson.weight) * loss + lesson.weight * distance(result, answers, lesson.temperature)
        loss.backward()
        optimizer.step()
    model.eval()


def distance(found: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """temperature^2 KL(teacher || student), both softened."""
    told = functional.log_softmax(answers / temperature, dim=1)
    mine = functional.log_softmax(found / temperature, dim=1)
    return temperature**2 * functional.kl_div(mine, told, reduction="batchmean", log_target=True)


def changed(images: Tensor, lesson: Lesson, mirror: bool, generator: torch.Generator) -> Tensor:
    """Each image shifted, half of them mirrored where that keeps their class, and with noise, in [0, 1]."""
    count, height, width, most = len(images), *images.shape[2:], lesson.shift
    padded = functional.pad(images, (most,) * 4)
    down, right = torch.randint(2 * most + 1, (2, count), generator=generator)
    rows = down[:, None] + torch.arange(height)
    columns = right[:, None] + torch.arange(width)
    moved = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if mirror:
        turned = torch.rand(count, generator=generator) < 0.5
        moved = torch.where(turned[:, None, None, None], moved.flip(3), moved)
    if lesson.turn:
        moved = turned_about(moved, lesson.turn, generator)
    noise = lesson.noise * torch.randn(moved.shape, generator=generator)
    return (moved + noise).clamp(0, 1)


def turned_about(images: Tensor, degrees: float, generator: torch.Generator) -> Tensor:
    """Each image turned, scaled and sheared about its middle."""
    count = len(images)
    angle = torch.deg2rad((2 * torch.rand(count, generator=generator) - 1) * degrees)
    stretch = 1 + _SCALE * (2 * torch.rand(count, generator=generator) - 1)
    shear = _SCALE * (2 * torch.rand(count, generator=generator) - 1)
    maps = torch.zeros(count, 2, 3)
    maps[:, 0, 0], maps[:, 0, 1] = angle.cos() * stretch, -angle.sin() + shear
    maps[:, 1, 0], maps[:, 1, 1] = angle.sin(), angle.cos() * stretch
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def blended(first: Tensor, second: Tensor, generator: torch.Generator) -> Tensor:
    """Each pair with a share of its own."""
    share = torch.rand(len(first), 1, 1, 1, generator=generator)
    return share * first + (1 - share) * second


# --- measuring


def taught(fleet: Fleet, name: str, lesson: Lesson) -> dict[str, float]:
    """Trains every device's network: accuracy of its answer, with and without the device's class shares."""
    made = exchange(fleet, lambda _: RANK)
    shape = tuple(fleet.test.images.shape[1:])
    teacher = Teacher(shape, made.space, fleet.dimensions, fleet.classes)
    plain, mixed, joint, joint_own = [], [], [], []
    general = log_softmax(logits(made.space, coordinates(made.space, fleet.test.features), fleet.classes))
    for number, part in enumerate(fleet.parts):
        prior = class_prior(part.labels, fleet.classes)
        softer = _temperature(fleet, part, made.space, made.counted(number))
        log_prior = torch.from_numpy(np.log(prior)).float() if lesson.teacher == "personal" else torch.zeros(1)

        def teach(images: Tensor, softer: float = softer, log_prior: Tensor = log_prior) -> Tensor:
            with torch.no_grad():
                return torch.cat([teacher(some) for some in images.split(250)]) / softer + log_prior

        torch.manual_seed(derive_seed(fleet.seed, "model", number))
        model = build_model(MODELS[name][number % 5], input_shape=shape, classes=fleet.classes)
        seed = derive_seed(fleet.seed, "own network", number)
        drawn = drawn_images(teacher, part.images, lesson.drawn, seed) if lesson.drawn else None
        train(model, part, lesson, teach, drawn, MIRROR[name], seed)
        result = _answers(model, fleet.test.images)
        plain.append(result)
        mixed.append(result + np.log(prior))
        joint.append(result + general)
        joint_own.append(result + log_softmax(personal(fleet, part, made.space, made.counted(number))[0]))
    (on_all, own), (prior_all, prior_own) = accuracies(fleet, plain), accuracies(fleet, mixed)
    beside = {"joint_all": accuracies(fleet, joint)[0], "joint_own": accuracies(fleet, joint_own)[1]}
    return {"all": on_all, "own": own, "prior_all": prior_all, "prior_own": prior_own, **beside}


def _temperature(fleet: Fleet, part: Part, space: ClassSpace, counted: tuple[int, ...]) -> float:
    result = leave_one_out(space, coordinates(space, part.features), part.labels, counted, fleet.classes)
    return best_temperature(result, part.labels, class_prior(part.labels, fleet.classes))


def _answers(model: nn.Module, images: Tensor) -> Array:
    with torch.no_grad():
        result = torch.cat([model(some) for some in images.split(500)])
    return np.asarray(functional.log_softmax(result.double(), dim=1).numpy())


def closed_form(fleet: Fleet) -> dict[str, float]:
    """What the networks learn from, on the same test part."""
    made = exchange(fleet, lambda _: RANK)
    general = logits(made.space, coordinates(made.space, fleet.test.features), fleet.classes)
    own = [personal(fleet, part, made.space, made.counted(number))[0] for number, part in enumerate(fleet.parts)]
    on_all, of_general = accuracies(fleet, [general] * len(fleet.parts))
    prior_all, prior_own = accuracies(fleet, own)
    return {
        "all": on_all,
        "own": of_general,
        "prior_all": prior_all,
        "prior_own": prior_own,
        "joint_all": on_all,
        "joint_own": prior_own,
    }


def variants(given: argparse.Namespace) -> dict[str, Lesson]:
    """The lessons of the table, or those of the search, by name."""
    if not given.search:
        return {name: lesson for name, lesson in LESSONS.items() if not given.only or name in given.only}
    lessons = {"alone": Lesson(), "alone, changed rows": Lesson(changed=True)}
    for teacher in ("personal", "general"):
        base = Lesson(teacher, changed=True)
        for change in SEARCH:
            lessons[f"{teacher} {change}"] = replace(base, **change)
    return lessons


SEARCH: list[dict[str, Any]] = [
    {},
    {"rate": 0.02},
    {"rate": 0.1},
    {"temperature": 1.0},
    {"temperature": 4.0},
    {"weight": 0.5},
    {"weight": 1.0},
    {"epochs": 120},
    {"shift": 2},
    {"noise": 0.0},
    {"noise": 0.1},
    {"mixed": 0.5},
    {"drawn": 600},
    {"drawn": 1500},
    {"drawn": 600, "weight": 0.75},
    {"drawn": 600, "turn": 15.0},
]


def measure(name: str, given: argparse.Namespace) -> None:
    known = read(given.results)
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for setting in SETTINGS[name]:
        for seed in given.seeds:
            fleet = make_fleet(setting, seed, given.data_dir)
            rows: dict[str, Callable[[], dict[str, float]]] = {"closed form": lambda fleet=fleet: closed_form(fleet)}
            for row, lesson in variants(given).items():
                lesson = lesson if given.epochs is None else replace(lesson, epochs=given.epochs)
                rows[row] = lambda fleet=fleet, lesson=lesson: {**taught(fleet, name, lesson), **asdict(lesson)}
            for row, compute in rows.items():
                if (setting.name, seed, row) in known:
                    continue
                start = time.perf_counter()
                kept = {"setting": setting.name, "seed": seed, "row": row, **compute()}
                kept["seconds"] = round(time.perf_counter() - start, 1)
                with given.results.open("a") as file:
                    file.write(json.dumps(kept) + "\n")
                print(f"{setting.name}, seed {seed}, {row}: {kept['seconds']} s", flush=True)


def print_tables(name: str, given: argparse.Namespace) -> None:
    result = read(given.results)
    for setting in SETTINGS[name]:
        seeds = [seed for seed in given.seeds if (setting.name, seed, "alone") in result]
        if not seeds:
            continue
        print(f"\n{setting.name}, seeds {', '.join(map(str, seeds))}")
        heads = ("all", "own", "own, with the prior", "all, beside the general answer", "own, beside the personal one")
        print(f"| | {' | '.join(heads)} | all, less alone | own, less alone |")
        print("|---|---|---|---|---|---|---|---|")
        for row in ("closed form", *variants(given)):
            have = [seed for seed in seeds if (setting.name, seed, row) in result]
            if not have:
                continue
            ones = [result[setting.name, seed, row] for seed in have]
            base = [result[setting.name, seed, "alone"] for seed in have]
            cells = [spread([one[what] for one in ones]) for what in FIGURES]
            for what in ("all", "own"):
                cells.append(paired([one[what] - other[what] for one, other in zip(ones, base, strict=True)]))
            print(f"| {row} | {' | '.join(cells)} |")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", help="these lessons alone")
    parser.add_argument("--search", action="store_true", help="try settings instead")
    parser.add_argument("--epochs", type=int, help="of every lesson")
    parser.add_argument("--data-dir", help="folder of the data sets; else FLEETDISTILL_DATA")
    parser.add_argument("--results", type=Path, default=Path("out/experiments/own_network.jsonl"))
    parser.add_argument("--table", action="store_true", help="print what is known and compute nothing")
    given = parser.parse_args()
    if not given.table:
        measure(given.name, given)
    print_tables(given.name, given)


if __name__ == "__main__":
    main()
