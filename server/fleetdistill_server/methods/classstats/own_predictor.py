"""The server's own predictor in class statistics with an averaged extractor (classstats.md, section 3.9)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.methods.classstats.gaussians import draw_classes, length
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.seeds import derive_seed
from fleetdistill.training.losses import soft_targets
from fleetdistill.training.rollback import train_or_roll_back
from fleetdistill_server.methods.classstats.merge import Classes
from fleetdistill_server.methods.cohort import Notes
from fleetdistill_server.methods.context import MethodContext


class OwnPredictor:
    """Trains the server's own predictor on rows drawn from the merged classes, and finds unrecognised classes.

    Args:
        network: The predictor, features to logits; changes in place.
        config: Settings of the method.
        context: Provides the compute device and the predictor's initial weights.
        feature_shape: Shape of one sample's features.
        nonnegative: Whether drawn rows are clipped at 0.
    """

    def __init__(
        self,
        network: nn.Module,
        config: AveragedConfig,
        context: MethodContext,
        feature_shape: tuple[int, ...],
        *,
        nonnegative: bool,
    ) -> None:
        self.network = network
        self.config = config
        self.context = context
        self.nonnegative = nonnegative
        self._feature_shape = feature_shape

    def soft_predictions(self, classes: Classes, seed: int) -> Array:
        """Returns the predictor's soft predictions `[rows, C]` for the rows that devices draw with this seed."""
        rows, _ = self.draw(classes, seed)
        return soft_targets(self.context.trainer.extract(self.network, rows), self.config.temperature).numpy()

    def untrainable(self, classes: Classes, notes: Notes) -> list[int]:
        """Guard: trains the predictor; if that fails, returns the class with the longest rows as the cause."""
        # Restarting from the initial weights removes the influence of devices and classes that left the merge.
        self.network.load_state_dict(self.context.server_model(self._feature_shape).state_dict())
        if not classes:
            return []
        train = partial(self._train, classes, notes.generator("predictor").initial_seed())
        failure = train_or_roll_back(train, self.network, rate=("learning_rate", self.config.learning_rate))
        if not failure:
            return []
        longest = max(classes, key=lambda label: length(classes[label]))
        text = (
            f"class {longest} is left out: the server's own predictor cannot be trained on rows drawn from the classes"
        )
        notes.event("class-left-out", f"{text}, and this class has the longest rows. {failure}")
        return [longest]

    def unrecognised(self, classes: Classes, least: float, notes: Notes) -> list[int]:
        """Guard: returns the classes whose drawn rows the predictor does not recognise often enough."""
        if not classes:
            return []
        found = self.recognition(classes, notes.generator("recognition").initial_seed())
        notes.report("recognition", {str(label): rate for label, rate in found.items()})
        poor = [label for label, rate in found.items() if rate < least and self.config.recognition_guard]
        for label in poor:
            text = (
                f"class {label} is left out: the server's own predictor recognises {found[label]:.3f} of its drawn rows"
            )
            remedy = "If the predictor is undertrained, raise server_epochs"
            notes.guard("recognition", f"{text}, at least {least:.3f} is required. {remedy}")
        return poor

    def _train(self, classes: Classes, seed: int) -> None:
        """Minimises the cross-entropy on drawn rows, with new rows in every epoch."""
        optimizer = make_local_optimizer(self.config, self.network.parameters())
        for epoch in range(self.config.server_epochs):
            rows, labels = self.draw(classes, derive_seed(seed, epoch))
            self.context.trainer.train_steps(
                self.network,
                len(labels),
                epochs=1,
                batch_size=self.config.batch_size,
                optimizer=optimizer,
                losses=partial(self._losses, rows, labels),
                generator=torch.Generator().manual_seed(derive_seed(seed, epoch, "order")),
            )

    def _losses(self, rows: Tensor, labels: Tensor, epoch: int, rows_b: Tensor) -> list[Tensor]:
        return [functional.cross_entropy(self.network(rows[rows_b]), labels[rows_b])]

    def recognition(self, classes: Classes, seed: int) -> dict[int, float]:
        """Returns for each class the share in [0, 1] of its drawn rows that the predictor assigns to it."""
        rows, labels = self.draw(classes, seed)
        right = self.context.trainer.extract(self.network, rows).argmax(dim=1) == labels.cpu()
        return {label: float(right[labels.cpu() == label].double().mean()) for label in classes}

    def draw(self, classes: Classes, seed: int) -> tuple[Tensor, Tensor]:
        """Draws `drawn_rows` rows of each class: features `[rows, *feature_shape]` and labels `[rows]`."""
        rows, labels = draw_classes(classes, self.config.drawn_rows, seed, nonnegative=self.nonnegative)
        where = self.context.torch_device
        return torch.from_numpy(rows).reshape(-1, *self._feature_shape).to(where), torch.from_numpy(labels).to(where)


def least_recognised(classes: int) -> float:
    """Returns the share of a class's drawn rows that must be recognised: twice the chance level.

    With two classes that would be every row, so 0.75 is used; with one class, 0.
    """
    return {1: 0.0, 2: 0.75}.get(classes, 2 / classes)
